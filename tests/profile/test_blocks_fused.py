"""The graphs of Megatron-Core's fused blocks keep what the sources say, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from evenload.model.presets import preset
from evenload.plan.mincut import decide
from evenload.plan.operators import Graph
from evenload.plan.patterns import match
from evenload.plan.policy import DEFAULT_SELECT, LayerPolicy
from evenload.profile.blocks import block_graph
from evenload.profile.fused.placeholders import placeholder_bytes
from evenload.profile.liveness import backward_events
from evenload.setup import Setup

SETUP = Setup(backend="megatron", seq=4096, micro_batch=2)
TOKENS, BF16, FP32 = 2 * 4096, 2, 4
LLAMA = preset("llama-3-8b")
HIDDEN, FFN, HEADS, KV, DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
DIVIDED = [(1, False), (4, False), (4, True)]


def dense(setup: Setup) -> Graph:
    return block_graph(LLAMA, LLAMA.blocks[0], setup)


@pytest.mark.parametrize(("tp", "sequence_parallel"), DIVIDED)
def test_a_dense_block_keeps_what_its_kernels_save(tp: int, sequence_parallel: bool) -> None:
    shard = tp if sequence_parallel else 1
    norms = 2 * (2 * HIDDEN * BF16 + FP32) * TOKENS // shard  # input, result, a number a row
    attention = ((2 * HEADS + 2 * KV) * DIM * BF16 + HEADS * FP32) * TOKENS // tp  # q, k, v, result, a number a row
    feed_forward = 3 * FFN * BF16 * TOKENS // tp  # gate and up, their product
    graph = dense(replace(SETUP, tp=tp, sequence_parallel=sequence_parallel))
    assert graph.kept_bytes == norms + attention + feed_forward


def test_a_dense_block_without_grouped_heads_keeps_what_korthikanti_counts() -> None:
    """Section 4 of arXiv 2205.05198 without dropout, scores and the feed-forward width."""
    model = preset("llama-2-7b")
    graph = block_graph(model, model.blocks[0], SETUP)
    statistics = sum(graph.nbytes(name) for name in graph.kept() if name.endswith(("rsigma", "logsumexp")))
    gated = 3 * 11008 * BF16 * TOKENS
    assert graph.kept_bytes - statistics - gated == 16 * TOKENS * 4096  # 4 norms' ends, q, k, v, result: 2 bytes each


def test_sequence_parallelism_keeps_shards_and_gathers_them_again() -> None:
    graph = dense(replace(SETUP, tp=4, sequence_parallel=True))
    whole = TOKENS * HIDDEN * BF16
    gathers = [operator for operator in graph.operators if operator.comm == "all_gather"]
    assert [graph.nbytes(operator.outputs[0]) for operator in gathers] == [whole, whole]
    assert not {name for operator in gathers for name in operator.outputs} & set(graph.kept())
    after = [operator for operator in graph.operators if gathers[0].outputs[0] in operator.inputs]
    assert [operator.backward_scratch for operator in after] == [whole]


def test_the_loss_writes_the_gradient_of_the_logits_over_them() -> None:
    graph = block_graph(LLAMA, LLAMA.head, SETUP)
    events = backward_events(graph, decide(graph, LayerPolicy()), full=False, weight_gradients=0)
    logits = TOKENS * VOCABULARY * BF16
    placeholder = HIDDEN * VOCABULARY * BF16
    hidden = TOKENS * HIDDEN * BF16
    above = max(accumulate(events, initial=graph.kept_bytes)) - logits - placeholder
    assert 0 < above < 5 * hidden  # no second tensor of the size of the logits


@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-2-2b", "qwen3-8b", "phi-4"])
def test_default_patterns_find_the_fused_activation(model: str) -> None:
    found = preset(model)
    graph = block_graph(found, found.blocks[-1], SETUP)
    hits = [[operator.path for operator in match(pattern, graph).operators] for pattern in DEFAULT_SELECT]
    assert hits == [["mlp.act_fn"], ["mlp.act_fn"]]


@pytest.mark.parametrize(
    ("ep", "etp", "tp", "sequence_parallel"), [(1, None, 1, False), (8, 1, 1, False), (8, 1, 2, True), (4, 2, 2, True)]
)
def test_experts_keep_their_rows_the_first_product_and_the_activation(
    ep: int, etp: int | None, tp: int, sequence_parallel: bool
) -> None:
    model = preset("mixtral-8x7b")
    setup = replace(SETUP, ep=ep, etp=etp, tp=tp, dp=8, sequence_parallel=sequence_parallel)
    graph = block_graph(model, model.blocks[0], setup)
    rows = TOKENS // tp * 2 * setup.expert_tp
    width = 14336 // setup.expert_tp
    inside = [name for name in graph.kept() if name.startswith("mlp.experts") and "rows" not in name]
    statistics = rows * FP32  # weights of the rows
    assert graph.total(inside) - statistics == rows * BF16 * (4096 + 3 * width)


def test_expert_rows_are_exchanged_twice() -> None:
    model = preset("mixtral-8x7b")
    graph = block_graph(model, model.blocks[0], replace(SETUP, ep=8, dp=8))
    rows = TOKENS * 2 * 4096 * BF16
    sent = [operator.comm_bytes for operator in graph.operators if operator.comm == "all_to_all"]
    assert sent.count(rows * 7 / 8) == 2
    assert all(operator.group == "expert" for operator in graph.operators if operator.comm == "all_to_all")


def test_latent_attention_keeps_latents_on_shards_and_heads_whole() -> None:
    model = preset("deepseek-v3")
    setup = replace(SETUP, tp=4, sequence_parallel=True)
    graph = block_graph(model, model.blocks[0], setup)
    sizes = {name: graph.nbytes(name) for name in graph.kept()}
    shard = TOKENS // 4
    assert sizes["self_attn.q_a_proj.linear"] == shard * 1536 * BF16
    assert sizes["self_attn.kv_a_proj_with_mqa.linear"] == shard * (512 + 64) * BF16
    assert sizes["self_attn.cat"] == sizes["self_attn.cat#2"] == TOKENS * 32 * 192 * BF16
    assert sizes["self_attn.contiguous"] == sizes["self_attn.flash_attention"] == TOKENS * 32 * 128 * BF16


def test_placeholders_are_one_for_each_shape_of_a_weight() -> None:
    layers = [(layer, block_graph(LLAMA, layer, SETUP)) for layer in (*LLAMA.blocks[:3], LLAMA.head, LLAMA.embedding)]
    shapes = HIDDEN * ((HEADS + 2 * KV) * DIM + HEADS * DIM + 3 * FFN)
    assert placeholder_bytes(layers, SETUP) == shapes * BF16


def test_experts_share_the_placeholder_of_their_shape() -> None:
    model = preset("mixtral-8x7b")
    setup = replace(SETUP, ep=2, dp=2)
    graph = block_graph(model, model.blocks[0], setup)
    attention = 4096 * ((32 + 2 * 8) * 128 + 4096)
    assert placeholder_bytes([(model.blocks[0], graph)], setup) == (attention + 3 * 4096 * 14336) * BF16


def test_mindspore_is_taken_to_keep_the_same() -> None:
    assert dense(replace(SETUP, backend="mindspore")) == dense(SETUP)
