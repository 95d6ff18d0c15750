"""Work and traffic of operators."""

from __future__ import annotations

from dataclasses import replace

import cases
import models
import pytest

from evenload.model.presets import preset
from evenload.profile.blocks import block_graph
from evenload.profile.hardware import sent_bytes
from evenload.setup import Setup

LLAMA = preset("llama-3-8b")
SETUP = Setup(seq=1024)
TOKENS, HIDDEN, FFN, BF16 = 1024, 4096, 14336, 2


def test_products_of_whole_models_equal_torch_s_counter() -> None:
    torch = pytest.importorskip("torch")
    from recording import build
    from torch.utils.flop_counter import FlopCounterMode

    torch.set_num_threads(1)
    for family in ("llama", "qwen2", "gemma2", "phi3", "deepseek_v2"):
        case = next(case for case in cases.FAMILIES[family]() if case.attention == "eager" and case.dtype == "bf16")
        if "first_k_dense_replace" in case.config:  # the counter knows no grouped products
            case = replace(case, config={**case.config, "first_k_dense_replace": 2})
        module, model = build(case), models.model_of(case.as_json())
        tokens = torch.zeros(case.batch, case.seq, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            module(input_ids=tokens, labels=tokens, use_cache=False)
        layers = (model.embedding, *model.blocks, model.head)
        graphs = [block_graph(model, layer, models.setup_of(case.as_json())) for layer in layers]
        assert counter.get_total_flops() == sum(op.flops for graph in graphs for op in graph.operators), family


def test_a_dense_block_of_llama_does_two_operations_a_parameter_and_token() -> None:
    graph = block_graph(LLAMA, LLAMA.blocks[0], SETUP)
    products = sum(op.flops for op in graph.operators if op.name == "linear")
    norms = 2 * HIDDEN
    assert products == 2 * TOKENS * (LLAMA.blocks[0].parameters - norms)


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_tensor_parallel_ranks_share_the_products(backend: str) -> None:
    def flops(tp: int) -> float:
        graph = block_graph(LLAMA, LLAMA.blocks[0], replace(SETUP, tp=tp, backend=backend))
        return sum(op.flops for op in graph.operators)

    assert flops(4) * 4 == flops(1)


def test_experts_work_on_the_rows_of_their_tokens() -> None:
    model = preset("mixtral-8x7b")
    for backend in ("torch", "megatron"):
        graph = block_graph(model, model.blocks[0], replace(SETUP, backend=backend))
        work = sum(op.flops for op in graph.operators if op.path.startswith("mlp.experts"))
        assert work == 2 * TOKENS * 2 * 3 * 4096 * 14336


def test_an_elementwise_operator_moves_what_it_reads_and_makes() -> None:
    graph = block_graph(LLAMA, LLAMA.blocks[0], SETUP)
    mul = next(op for op in graph.operators if op.label == "mlp.mul")
    assert mul.moved == 3 * TOKENS * FFN * BF16
    neg = next(op for op in graph.operators if op.label == "self_attn.neg")
    assert neg.moved == 2 * TOKENS * HIDDEN // 2 * BF16  # half of every head


@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize(
    ("sequence_parallel", "kinds"), [(False, ["all_reduce"] * 2), (True, ["all_gather", "reduce_scatter"] * 2)]
)
def test_each_half_of_a_block_communicates_once_each_way(
    backend: str, sequence_parallel: bool, kinds: list[str]
) -> None:
    setup = replace(SETUP, tp=4, backend=backend, sequence_parallel=sequence_parallel)
    graph = block_graph(LLAMA, LLAMA.blocks[0], setup)
    collectives = [op for op in graph.operators if op.comm]
    assert [op.comm for op in collectives] == kinds
    hidden = TOKENS * HIDDEN * BF16
    assert [op.comm_bytes for op in collectives] == [sent_bytes(kind, hidden, 4) for kind in kinds]


@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-2b", "qwen3-8b", "phi-4", "deepseek-v2-lite", "mixtral-8x7b"])
def test_operators_have_the_weights_of_their_layer(name: str, backend: str) -> None:
    model = preset(name)
    setup = replace(SETUP, backend=backend)
    for layer in (*model.blocks[:2], model.embedding, model.head):
        weights = sum(op.weight_bytes for op in block_graph(model, layer, setup).operators)
        count = layer.parameters
        if layer.role == "head" and model.tied:
            count += model.vocabulary * model.hidden
        if layer.role in {"head", "embedding"}:
            count += (setup.vocabulary_rows(model.vocabulary) - model.vocabulary) * model.hidden
        if name.startswith("deepseek") and layer.kind == "moe" and backend == "torch":
            count += model.hidden * 64  # the router's weight is fp32
        assert weights == BF16 * count, layer.kind
