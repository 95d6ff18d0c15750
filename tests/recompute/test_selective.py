"""Compiled blocks: the same policy as a context for torch's selective checkpoint."""

from __future__ import annotations

import pytest
import torch
from tests.recompute import blocks
from tests.recompute.measuring import allocated, gradients, same
from tests.recompute.models import DEFAULT, FAMILIES, toy
from torch.utils.checkpoint import checkpoint

from evenload import EvenloadError
from evenload.plan.policy import LayerPolicy
from evenload.recompute import apply, selective_checkpoint

torch.set_num_threads(1)

GENERATOR = 5056
"""Bytes of the state of the processor's generator, which torch's checkpoint keeps as well."""


class Stack:
    """Two blocks, called in several ways."""

    def __init__(self, name: str) -> None:
        if name == "toy":
            self.model, _ = toy(layers=2)
            self.layers, self.x, self.options = self.model.layers, torch.randn(2, 16, 32), {}
        else:
            self.model, _ = FAMILIES["llama"](num_hidden_layers=2)
            self.layers, self.x = self.model.model.layers, torch.randn(2, 32, 64)
            self.options = {"position_embeddings": self.model.model.rotary_emb(self.x, torch.arange(32)[None])}

    def loss(self, calls):
        state = self.x.clone().requires_grad_() * 1
        for call in calls:
            state = call(state, **self.options)
        return state.square().mean()

    def gradients(self, calls):
        self.model.zero_grad()
        self.loss(calls).backward()
        return gradients(self.model)

    def kept(self, calls):
        return allocated(lambda: self.loss(calls))[0]

    def selected(self, context_fn):
        def wrapped(layer):
            return lambda x, **options: checkpoint(layer, x, use_reentrant=False, context_fn=context_fn, **options)

        return [wrapped(layer) for layer in self.layers]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("patterns", [DEFAULT, (".*norm",), (".*",)])
@pytest.mark.parametrize("name", ["toy", pytest.param("llama", marks=pytest.mark.slow)])
def test_bytes_are_as_reported_eager_and_compiled(name, patterns):
    stack = Stack(name)
    plain = stack.kept(stack.layers)
    expected = stack.gradients(stack.layers)
    chosen = selective_checkpoint(stack.layers[0], patterns, stack.x, **stack.options)
    assert not chosen.not_expressed
    calls = stack.selected(chosen.context_fn)
    assert same(stack.gradients(calls), expected)
    kept = stack.kept(calls) - 2 * GENERATOR
    assert plain - kept == 2 * (chosen.before - chosen.kept_bytes) == 2 * chosen.report.freed
    torch._dynamo.reset()
    compiled = [torch.compile(call, backend="aot_eager", fullgraph=True) for call in calls]
    for _ in range(2):
        assert same(stack.gradients(compiled), expected)
    # the compiler keeps the generator's state only if attention, which could draw, runs again
    assert stack.kept(compiled) == kept + (2 * GENERATOR if name == "llama" and patterns == (".*",) else 0)


def test_a_block_that_is_compiled_already():
    stack = Stack("toy")
    before = selective_checkpoint(stack.layers[0], DEFAULT, stack.x)
    stack.layers[0].compile(backend="aot_eager", fullgraph=True)
    assert selective_checkpoint(stack.layers[0], DEFAULT, stack.x) == before
    wrapped = torch.compile(stack.layers[1], backend="aot_eager")
    assert selective_checkpoint(wrapped, DEFAULT, stack.x) == before
    with pytest.raises(EvenloadError, match=r"'layers.0' is compiled.*\n.*selective_checkpoint"):
        apply(stack.model, select=DEFAULT)


def test_a_recomputed_layer_inside_a_compiled_model_runs_as_it_is():
    model, _ = toy()
    x = torch.randn(2, 16, 8)
    model(x).backward()
    expected = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    with apply(model, select=DEFAULT) as handle:
        torch.compile(model, backend="aot_eager")(x).backward()
        assert same(gradients(model), expected)
        assert dict(handle._states[0].served) == {"recorded": 1}
        torch._dynamo.reset()
        with pytest.raises(Exception, match="evenload recomputes this layer"):
            torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def test_what_cannot_be_said_to_torchs_checkpoint_is_named():
    model, _ = toy(blocks.InPlace, layers=1)
    x = torch.randn(2, 16, 32)
    chosen = selective_checkpoint(model.layers[0], ["tanh"], x)
    assert any("writes in place" in note for note in chosen.not_expressed)
    attention, _ = toy(blocks.Attention, layers=1)
    alone = LayerPolicy(full=True, select_exclude=("scaled_dot_product_attention",))
    assert selective_checkpoint(attention.layers[0], alone, x).kept_bytes > x.nbytes
    ends, _ = toy(blocks.Dropout, layers=1)
    chosen = selective_checkpoint(ends.layers[0], ["nothing"], x)
    assert chosen.not_expressed == (
        "drop.dropout.div_ writes in place, so that its result is computed again and not kept",
    )


def test_a_block_that_cannot_run_on_fake_tensors():
    model, _ = toy(blocks.Branch, layers=1)
    with pytest.raises(EvenloadError, match="cannot be rehearsed"):
        selective_checkpoint(model.layers[0], DEFAULT, torch.randn(2, 16, 32))
