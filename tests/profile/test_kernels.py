"""The rules of CUDA's kernels, spelled out case by case from PyTorch's sources."""

from __future__ import annotations

import pytest

from evenload.errors import EvenloadError
from evenload.model.huggingface import model_from_config
from evenload.plan.operators import Graph
from evenload.profile.blocks import block_graph
from evenload.profile.cost import backward_time
from evenload.profile.kernels import kernel
from evenload.setup import Setup

HALF, SINGLE, DOUBLE = 2, 4, 8


@pytest.mark.parametrize(
    ("width", "dims", "how", "runs"),
    [
        (HALF, {128}, "", "flash"),
        (HALF, {128}, "grouped", "flash"),  # it reads grouped keys as they are
        (HALF, {100}, "grouped", "flash"),  # padded to 104
        (HALF, {256}, "", "flash"),
        (HALF, {264}, "", "efficient"),  # wider than the flash kernel takes
        (HALF, {264}, "grouped", "math"),
        (HALF, {257}, "", "math"),  # no multiple of 16 bytes
        (HALF, {128}, "masked", "efficient"),  # the flash kernel takes no mask
        (HALF, {128}, "grouped masked", "math"),  # and the other no grouped keys
        (HALF, {100}, "masked", "math"),
        (HALF, {128}, "oblong", "efficient"),  # causal, with other keys than queries
        (HALF, {192, 128}, "", "efficient"),
        (HALF, {192, 100}, "", "math"),
        (SINGLE, {128}, "", "efficient"),  # there is no flash kernel in fp32
        (SINGLE, {128}, "masked", "efficient"),
        (SINGLE, {100}, "", "efficient"),  # 16 bytes are four elements
        (SINGLE, {98}, "", "math"),
        (SINGLE, {128}, "grouped", "math"),
        (SINGLE, {512}, "", "efficient"),
        (DOUBLE, {128}, "", "math"),
    ],
)
def test_the_first_kernel_that_takes_the_tensors_runs(width, dims, how, runs):
    facts = {"same_heads": "grouped" not in how, "masked": "masked" in how, "square": "oblong" not in how}
    assert kernel(width=width, dims=dims, **facts) == runs


def graph(setup: Setup, **changes: int) -> Graph:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    base = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    model = model_from_config({**base, "vocab_size": 50, **heads, **changes})
    return block_graph(model, model.blocks[0], setup)


def test_grouped_keys_in_fp32_keep_the_scores():
    setup = Setup(dtype="fp32", seq=512)
    scores = 8 * 512 * 512 * 4
    assert scores in [value.nbytes for value in map(graph(setup).by_name.get, graph(setup).kept()) if value]
    as_many = graph(setup, num_key_value_heads=8)
    assert max(as_many.nbytes(name) for name in as_many.kept()) < scores


def test_products_of_written_scores_are_timed_as_products():
    operators = [op for op in graph(Setup(dtype="fp32", seq=64)).operators if op.heavy and "scaled" in op.name]
    assert [operator.aten for operator in operators] == ["bmm", "bmm"]
    whole = graph(Setup(dtype="fp32", seq=64))
    assert [backward_time(whole, operator, lambda op: op.flops) / operator.flops for operator in operators] == [2, 2]


def test_a_sequence_is_not_divided_without_a_fused_kernel():
    with pytest.raises(EvenloadError, match="no fused kernel takes these heads"):
        graph(Setup(dtype="fp32", seq=64, cp=2))
    assert graph(Setup(dtype="fp32", seq=64, cp=2), num_key_value_heads=8).kept_bytes
