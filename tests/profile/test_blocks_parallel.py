"""What divides a block of the `torch` backend: experts, context, heads; and the parts outside transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenload.errors import EvenloadError
from evenload.model import Layer, Model
from evenload.model.huggingface import model_from_config
from evenload.model.presets import preset
from evenload.plan.mincut import decide
from evenload.plan.operators import Graph
from evenload.plan.policy import LayerPolicy
from evenload.profile.blocks import block_graph, graph_notes, table_bytes
from evenload.profile.liveness import backward_events, forward_events
from evenload.setup import Setup

SETUP = Setup(seq=2048, micro_batch=2)
TOKENS, BF16, FP32, INDEX = 2 * 2048, 2, 4, 8
MIXTRAL, LLAMA, DEEPSEEK = preset("mixtral-8x7b"), preset("llama-3-8b"), preset("deepseek-v3")
HIDDEN, FFN, TOP_K = 4096, 14336, 2


def experts(setup: Setup) -> Graph:
    return block_graph(MIXTRAL, MIXTRAL.blocks[0], setup)


def inside(graph: Graph, *, part: str = "mlp.experts") -> int:
    return graph.total(name for name in graph.kept() if name.startswith(part))


def test_expert_parallelism_keeps_the_rows_that_arrive() -> None:
    graph = experts(replace(SETUP, ep=8, dp=8))
    rows = TOKENS * TOP_K
    arrived = rows * HIDDEN * BF16 + rows * 3 * FFN * BF16 + rows * FFN * BF16
    returned = rows * HIDDEN * BF16
    small = rows * (3 * INDEX + INDEX + FP32) + 8 * 4  # places of three copies and of the return, weights, row ends
    assert inside(graph) == pytest.approx(arrived + returned, abs=2 * small)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_expert_parallelism_divides_the_rows_over_tensor_parallel_ranks(sequence_parallel: bool) -> None:
    alone = experts(replace(SETUP, ep=8, dp=8))
    shared = experts(replace(SETUP, ep=8, dp=8, etp=1, tp=2, sequence_parallel=sequence_parallel))
    assert inside(shared) == pytest.approx(inside(alone) / 2, rel=1e-5)


def test_without_expert_parallelism_ranks_divide_the_width_of_every_expert() -> None:
    whole, half = experts(SETUP), experts(replace(SETUP, tp=2))
    rows = TOKENS * TOP_K
    width = rows * 4 * FFN * BF16
    assert inside(whole) - inside(half) == width / 2


def test_an_expert_that_is_divided_gets_the_rows_of_all_its_ranks() -> None:
    graph = experts(replace(SETUP, ep=4, etp=2, tp=2, dp=4, sequence_parallel=True))
    alone = experts(replace(SETUP, ep=4, etp=1, tp=2, dp=4, sequence_parallel=True))
    gathers = [op for op in graph.operators if op.path == "mlp.experts" and op.comm == "all_gather"]
    rows = TOKENS // 2 * TOP_K * HIDDEN * BF16
    assert [graph.nbytes(op.outputs[0]) for op in gathers] == [2 * rows]
    assert not [op for op in alone.operators if op.path == "mlp.experts" and op.comm == "all_gather"]


def test_rows_go_to_their_experts_and_come_back() -> None:
    graph = experts(replace(SETUP, ep=8, dp=8))
    sent = [op.comm_bytes for op in graph.operators if op.comm == "all_to_all"]
    assert sent == [TOKENS * TOP_K * HIDDEN * BF16 * 7 / 8] * 2


def test_context_parallelism_keeps_the_rank_s_own_keys_and_gathers_the_others() -> None:
    alone = block_graph(LLAMA, LLAMA.blocks[0], SETUP)
    divided = block_graph(LLAMA, LLAMA.blocks[0], replace(SETUP, cp=4))
    assert divided.kept_bytes * 4 == alone.kept_bytes
    (gather,) = [op for op in divided.operators if op.comm]
    keys_values = 2 * TOKENS * 8 * 128 * BF16
    assert (gather.group, gather.comm_bytes) == ("context", keys_values * 3 / 4)
    assert gather.outputs[0] not in divided.kept()


def test_context_parallel_ranks_share_the_pairs_of_causal_attention() -> None:
    def flops(setup: Setup) -> float:
        graph = block_graph(LLAMA, LLAMA.blocks[0], setup)
        return next(op.flops for op in graph.operators if op.name == "scaled_dot_product_attention")

    assert flops(replace(SETUP, cp=4)) * 4 == flops(SETUP)
    assert flops(SETUP) == 4 * 2 * 32 * 128 * (2048 * 2049 / 2)  # two products, sequences, heads, width, pairs


def test_more_ranks_than_key_heads_hold_one_each() -> None:
    graph = block_graph(LLAMA, LLAMA.blocks[0], replace(SETUP, tp=16))
    assert graph.nbytes("self_attn.k_proj.linear") == TOKENS * 128 * BF16
    assert graph.nbytes("self_attn.q_proj.linear") == TOKENS * 2 * 128 * BF16


def test_eager_attention_cannot_divide_a_sequence() -> None:
    with pytest.raises(EvenloadError, match="eager attention cannot divide a sequence"):
        block_graph(LLAMA, LLAMA.blocks[0], replace(SETUP, attention="eager", cp=2))


def test_a_layer_without_sizes_is_named() -> None:
    with pytest.raises(EvenloadError, match="a dense layer has no attention"):
        block_graph(LLAMA, Layer(kind="dense", role="block", tensors=()), SETUP)


def test_the_head_holds_three_fp32_tensors_of_logits_in_backward() -> None:
    graph = block_graph(LLAMA, LLAMA.head, SETUP)
    logits = TOKENS * 128256
    assert graph.nbytes("cross_entropy") == logits * FP32
    decision = decide(graph, LayerPolicy())
    peak = level = float(graph.kept_bytes)
    for change in backward_events(graph, decision, full=False, weight_gradients=0):
        level += change
        peak = max(peak, level)
    rest = graph.kept_bytes - logits * FP32  # norm and labels
    assert peak - rest == pytest.approx(3 * logits * FP32, rel=1e-4)


def test_the_head_s_forward_holds_logits_in_both_types() -> None:
    graph = block_graph(LLAMA, LLAMA.head, SETUP)
    level = peak = 0.0
    for change in forward_events(graph, decide(graph, LayerPolicy()).kept):
        level += change
        peak = max(peak, level)
    logits = TOKENS * 128256
    rest = TOKENS * HIDDEN * (FP32 + BF16 + BF16 + BF16)  # input, fp32 copy, both ends of the weight
    assert 0 <= peak - logits * (BF16 + FP32 + FP32) - rest < 0.01 * rest


def test_a_capped_head_keeps_one_more_tensor_of_logits() -> None:
    gemma = preset("gemma-2-2b")
    capped = block_graph(gemma, gemma.head, SETUP)
    plain = block_graph(replace(gemma, final_softcap=None), gemma.head, SETUP)
    assert capped.kept_bytes - plain.kept_bytes == TOKENS * gemma.vocabulary * BF16


def mtp(setup: Setup) -> tuple[Graph, Graph, Graph]:
    layers = DEEPSEEK.mtp[0], DEEPSEEK.blocks[-1], DEEPSEEK.head
    predicted, block, head = (block_graph(DEEPSEEK, layer, setup) for layer in layers)
    return predicted, block, head


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_multi_token_prediction_keeps_a_block_a_head_and_two_norms(backend: str) -> None:
    predicted, block, head = mtp(replace(SETUP, backend=backend))
    hidden = TOKENS * 7168
    joined = 2 * hidden * BF16  # what eh_proj keeps
    copies = hidden * (FP32 + BF16) if backend == "torch" else hidden * BF16
    small = 2 * TOKENS * FP32
    norms = 2 * copies + small + joined
    assert predicted.kept_bytes == pytest.approx(norms + block.kept_bytes + head.kept_bytes, rel=2e-3)


def test_multi_token_prediction_hands_the_hidden_state_on_and_takes_its_gradient() -> None:
    predicted, *_ = mtp(SETUP)
    assert predicted.nbytes(predicted.output) == predicted.nbytes(predicted.input)
    events = backward_events(predicted, decide(predicted, LayerPolicy()), full=False)
    assert sum(events) == -predicted.kept_bytes
    assert max(events) >= TOKENS * 129280 * FP32  # the gradient of the logits was made


@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize(
    "name", ["gpt", "llama-4-scout", "phi-4", "gemma-3-4b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b"]
)
def test_every_layer_of_every_family_has_a_graph(name: str, backend: str) -> None:
    model = layer_norm_model() if name == "gpt" else preset(name)
    graphs = [block_graph(model, layer, replace(SETUP, backend=backend)) for layer in model.kinds()]
    assert all(graph.kept_bytes > 0 for graph in graphs[1:])
    assert table_bytes(graphs).kept > 0


def layer_norm_model() -> Model:
    llama = model_from_config(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "vocab_size": 100,
        }
    )
    layers = []
    for layer in llama.layers:
        block = layer.feed_forward and replace(layer.feed_forward, gated=False, activation="gelu")
        layers.append(replace(layer, norm="layer_norm", feed_forward=block))
    return replace(llama, layers=tuple(layers))


def test_layer_norm_keeps_its_input_and_two_numbers_a_row() -> None:
    model = layer_norm_model()
    graph = block_graph(model, model.blocks[0], SETUP)
    norm = next(op for op in graph.operators if op.path == "input_layernorm")
    assert [graph.nbytes(name) for name in norm.saves if not graph.by_name[name].held] == [
        TOKENS * 64 * BF16,
        TOKENS * FP32,
        TOKENS * FP32,
    ]


def test_what_is_assumed_is_said() -> None:
    notes = " ".join(graph_notes(MIXTRAL, replace(SETUP, ep=8, dp=8)))
    assert "grouped products" in notes
    assert "evenly" in notes
    assert "evenly" not in " ".join(graph_notes(MIXTRAL, SETUP))
    assert "Megatron" in " ".join(graph_notes(LLAMA, replace(SETUP, backend="mindspore")))
    assert "fp8" in " ".join(graph_notes(LLAMA, replace(SETUP, dtype="fp8")))
