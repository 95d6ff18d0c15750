"""Gradients to the bit, bytes as predicted and operators that run again, on toys and on Hugging Face models."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from tests.recompute import blocks
from tests.recompute.measuring import Operators, allocated, gradients, same
from tests.recompute.models import FAMILIES, toy

from evenload.recompute import apply

torch.set_num_threads(1)

EVERYTHING = (".*", r".*\..*")
NORMS = (r".*norm", r".*\..*norm")
TOYS = {
    "views": blocks.Views,
    "in-place": blocks.InPlace,
    "dropout": blocks.Dropout,
    "custom function": blocks.CustomFunction,
    "attention": blocks.Attention,
    "attention with dropout": lambda: blocks.Attention(0.3),
    "layer norm": blocks.LayerNorm,
    "batch norm": blocks.BatchNorm,
    "branch": blocks.Branch,
    "functional": blocks.Functional,
}


@contextmanager
def math_attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


def step(model, forward):
    """One step with fixed random numbers: gradients, and the next random number."""
    model.zero_grad()
    torch.manual_seed(7)
    forward().backward()
    return gradients(model), torch.rand(1)


def seeded(forward):
    torch.manual_seed(7)
    return forward()


def check(model, forward, patterns) -> None:
    """All that must hold of any model under any patterns."""
    step(model, forward)
    expected, random = step(model, forward)
    plain = allocated(lambda: seeded(forward))[0]
    with Operators() as before:
        step(model, forward)
    with apply(model, select=patterns) as handle:
        for _ in range(3):
            found, drawn = step(model, forward)
            assert same(found, expected)
            assert torch.equal(drawn, random)
        assert plain - allocated(lambda: seeded(forward))[0] == handle.report().freed
        with Operators() as after:
            step(model, forward)
        report = handle.report()
    again = after.counts - before.counts
    rerun = sum(len(state.last.program.calls) for state in handle._states)
    assert bool(again) == (report.freed > 0) == bool(rerun)
    assert again.total() >= rerun
    assert not before.counts - after.counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patterns", [EVERYTHING, (".*",)], ids=["everything", "modules"])
@pytest.mark.parametrize("name", TOYS)
def test_toys(name, patterns, dtype):
    model, forward = toy(TOYS[name], dtype=dtype)
    check(model, forward, patterns)


@pytest.mark.parametrize("name", ["attention", "attention with dropout", "functional"])
def test_toys_under_math_attention_and_autocast(name):
    model, forward = toy(TOYS[name])

    def run():
        with math_attention(), torch.autocast("cpu", torch.bfloat16):
            return forward()

    check(model, run, EVERYTHING)


MODES = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": True},
    "eager attention": {"attn_implementation": "eager"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_families(family, mode):
    options = dict(MODES[mode])
    autocast = options.pop("autocast", False)
    model, forward = FAMILIES[family](**options)

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return forward()

    for patterns in ((r"mlp\.mul", r"mlp\.act_fn\.silu", r"mlp\.experts\.mul"), NORMS, EVERYTHING):
        check(model, run, patterns)


def test_hugging_face_under_math_attention():
    model, forward = FAMILIES["llama"]()

    def run():
        with math_attention():
            return forward()

    check(model, run, (r"self_attn\..*",))
