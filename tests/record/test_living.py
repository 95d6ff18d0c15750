"""What counts as alive, next to tensors that are no memory."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import evenload
from evenload.ledger.growth import growth
from evenload.record.living import living_storages, living_tensors

MIB = 1 << 20


@pytest.fixture
def traced():
    """What a compiler leaves behind: tensors of unknown size, a view, and a graph that saved one."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    x = mode.from_tensor(torch.randn(4, 6, requires_grad=True), static_shapes=False)
    with mode:
        return x, x.detach()[1:], (x * x).exp()


def test_tensors_of_unknown_size_are_no_memory(traced):
    living = {id(tensor) for tensor in living_tensors()}
    assert not living & {id(tensor) for tensor in traced}
    assert all(type(nbytes) is int for nbytes in living_storages().values())


def test_what_keeps_a_tensor_of_unknown_size_is_no_memory_either(traced):
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(traced[0])
            return x * 2

    y = Keep.apply(torch.ones(1, requires_grad=True))
    assert all(type(nbytes) is int for nbytes in living_storages().values())
    del y


def test_a_program_that_compiled_something_is_recorded_as_ever(traced):
    kept = []
    with evenload.record(stacks=True) as recording:
        for _ in range(6):
            kept.append(torch.empty(MIB // 4))
            recording.step()
    [one] = growth(recording.ledger)
    assert one.per_step == MIB
    assert "kept" in one.owner


def test_modules_without_sizes_yet_are_recorded_as_ever():
    lazy, kept = nn.LazyLinear(4), []
    with evenload.record(stacks=True) as recording:
        for _ in range(6):
            kept.append(torch.empty(MIB // 4)[:8])
            recording.step()
    assert lazy.has_uninitialized_params()
    [one] = growth(recording.ledger)
    assert (one.per_step, one.reach) == (MIB, 32)
    assert "kept" in one.owner
