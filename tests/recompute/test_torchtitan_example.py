"""The example that hands a policy to torchtitan's blocks, on blocks of the same kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.recompute.measuring import allocated, gradients, same
from tests.recompute.test_names import TitanBlock
from torch import nn

from evenload.plan.policy import Policy

torch.set_num_threads(1)

FILE = Path(__file__).parents[2] / "examples" / "torchtitan_policy.py"


def example():
    spec = importlib.util.spec_from_file_location("torchtitan_policy", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample():
    return (torch.empty(2, 16, 32),), {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_every_layer_does_what_its_policy_says(compiled, capsys):
    torch.manual_seed(0)
    layers = nn.ModuleList(TitanBlock() for _ in range(4))
    x = torch.randn(2, 16, 32)
    policy = Policy(
        full=frozenset({0}),
        select={r"feed_forward\.mul": frozenset({1, 2}), r"feed_forward\.silu": frozenset({2})},
    )

    def loss(blocks):
        state = x.clone().requires_grad_() * 1
        for block in blocks:
            state = block(state)
        return state.square().mean()

    def step(blocks):
        layers.zero_grad()
        loss(blocks).backward()
        return gradients(layers)

    expected, plain = step(layers), allocated(lambda: loss(layers))[0]
    wrapped = [
        example().wrap_block(block, f"layers.{at}", policy, sample, preserve_rng_state=False)
        for at, block in enumerate(layers)
    ]
    assert wrapped[3] is layers[3]
    said = capsys.readouterr().out
    assert [line.partition(":")[0] for line in said.splitlines()] == ["layers.1", "layers.2"]
    freed = [int(line.split()[-1]) - int(line.split()[2]) for line in said.splitlines()]
    wide = 2 * 16 * 88 * 4
    assert freed == [wide, 2 * wide]
    assert same(step(wrapped), expected)
    whole = plain - allocated(lambda: loss([wrapped[0], *layers[1:]]))[0]
    assert plain - allocated(lambda: loss(wrapped))[0] == whole + sum(freed)
    if compiled:
        torch._dynamo.reset()
        compiled_blocks = [torch.compile(block, backend="aot_eager", fullgraph=True) for block in wrapped]
        assert same(step(compiled_blocks), expected)


def test_blocks_on_the_meta_device_are_planned_for_the_device_of_the_sample():
    with torch.device("meta"):
        block = TitanBlock()
    wrapped = example().wrap_block(block, "layers.1", Policy(select={"feed_forward": frozenset({1})}), sample)
    assert wrapped is not block
    assert all(parameter.is_meta for parameter in wrapped.parameters())


def test_the_class_is_torchtitans_own():
    pytest.importorskip("torchtitan")
    made = example().activation_checkpointing(Policy(full=frozenset({0})), sample)
    assert made(made.Config())._wrap_block(TitanBlock(), base_fqn="layers.0") is not None
