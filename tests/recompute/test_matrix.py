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
        assert plain - allocated(lambda: seeded(forward))[0] == handle.report().freed >= 0
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


class OwnActivation(torch.nn.Module):
    def forward(self, x):
        return blocks.Gate.apply(x, x.cos())


def with_activation(make):
    """A Llama whose blocks have another activation."""
    model, forward = FAMILIES["llama"]()
    for layer in model.model.layers:
        layer.mlp.act_fn = make()
    return model, forward


CHANGED = {
    "in place": lambda: with_activation(lambda: torch.nn.SiLU(inplace=True)),
    "custom function": lambda: with_activation(OwnActivation),
    "dropout": lambda: with_activation(lambda: torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.3))),
    "attention dropout": lambda: FAMILIES["llama"](attention_dropout=0.2),
    "eager attention dropout": lambda: FAMILIES["llama"](attention_dropout=0.2, attn_implementation="eager"),
    "biases": lambda: FAMILIES["llama"](attention_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("patterns", [(r"mlp\..*", r"self_attn\..*"), EVERYTHING], ids=["inside", "everything"])
@pytest.mark.parametrize("name", CHANGED)
def test_hugging_face_blocks_with_what_makes_it_difficult(name, patterns):
    model, forward = CHANGED[name]()
    model.train()
    check(model, forward, patterns)


@pytest.mark.parametrize("make", [toy, FAMILIES["llama"], FAMILIES["qwen3"]])
def test_only_the_recording_step_holds_more_and_at_most_one_layers_intermediates(make):
    model, forward = make()
    step(model, forward)
    kept, peak, _ = allocated(forward)
    with apply(model, select=EVERYTHING) as handle:
        first = allocated(forward)[1]
        (graph, *_) = handle.graphs().values()
        assert first <= peak + graph.total(value.name for value in graph.values if not value.held)
        for _ in range(2):
            left, highest, _ = allocated(forward)
            assert left <= kept
            assert highest <= peak
    with apply(model, select=EVERYTHING, rehearse=True):
        assert allocated(forward)[1] <= peak


def test_hugging_face_under_math_attention():
    model, forward = FAMILIES["llama"]()

    def run():
        with math_attention():
            return forward()

    check(model, run, (r"self_attn\..*",))
