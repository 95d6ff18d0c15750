"""When allocations of a recording are made, last used and freed."""

import gc

import torch
from tests.record.recorded import record_step, where
from tests.record.training import Stack

import evenload
from evenload.ledger.curve import curve, peaks
from evenload.ledger.ledger import ALIVE
from evenload.ledger.words import Phase


def test_last_use_and_free_bound_the_life_of_a_tensor():
    with evenload.record() as recording:
        kept = torch.ones(1000)
        used = kept + 1
        del used
        torch.ones(10)
    rows = recording.ledger.allocations
    assert rows.freed[0] == ALIVE
    assert rows.last_used[0] > rows.allocated[1]
    assert rows.freed[1] > rows.last_used[1] >= rows.allocated[1]
    assert rows.last_used[1] < rows.allocated[2]


def test_dead_memory_that_is_held_shows_between_needed_and_held_peak():
    with evenload.record() as recording:
        dead = torch.ones(1000) + 1
        torch.ones(1000).mul_(2)
    found = peaks(recording.ledger)
    assert found.held == 8000
    assert found.needed == 8000  # the ones and their sum were needed together
    with evenload.record() as recording:
        dead = torch.ones(500)
        big = torch.ones(1000)
        del big
        torch.ones(1000)
    found = peaks(recording.ledger)
    assert (found.needed, found.held) == (4000, 6000)
    assert dead.numel() == 500


def test_views_and_in_place_operators_make_no_memory():
    with evenload.record() as recording:
        base = torch.ones(100, 100)
        base[3].view(10, 10).t().add_(1).mul_(2)
        base.unsqueeze(0).expand(5, 100, 100)
    assert len(recording.ledger.allocations) == 1


def test_a_view_that_keeps_a_large_base_alive_is_shown():
    with evenload.record() as recording:
        corner = torch.ones(1000, 1000)[:2, :3]
        whole = torch.ones(50)
        halves = torch.ones(60).chunk(2)
    rows = recording.ledger.allocations
    assert rows.nbytes.tolist() == [4_000_000, 200, 240]
    assert rows.reach.tolist() == [corner.nbytes, -1, -1]
    assert whole.numel() + halves[0].numel() == 80


def test_an_activation_of_which_backward_reads_a_part_is_shown():
    class Part(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            doubled = x * 2
            ctx.save_for_backward(doubled[:, 0])
            return doubled.sum(1)

        @staticmethod
        def backward(ctx, gradient):
            return (gradient * ctx.saved_tensors[0])[:, None].expand(-1, 64)

    x = torch.randn(32, 64, requires_grad=True)
    ledger = record_step(None, lambda: Part.apply(x).sum())
    (row,) = where(ledger, operator="aten.mul.Tensor", phase=Phase.FORWARD)
    assert (ledger.allocations.nbytes[row], ledger.allocations.reach[row]) == (32 * 64 * 4, 32 * 4)


def test_a_resized_storage_is_followed():
    with evenload.record() as recording:
        tensor = torch.ones(1000)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(4000)
        tensor.untyped_storage().resize_(400)
    ledger = recording.ledger
    assert ledger.allocations.nbytes.tolist() == [4000, 4000, 400]
    assert ledger.allocations.previous.tolist() == [-1, 0, 1]
    assert curve(ledger).level.tolist() == [4000, 0, 4000, 4400, 400]


def test_memory_freed_by_the_garbage_collector_is_freed_there():
    class Holder:
        pass

    gc.collect()
    with evenload.record() as recording:
        holder = Holder()
        holder.self, holder.tensor = holder, torch.ones(1000)
        del holder
        before = torch.ones(1)
        gc.collect()
        after = torch.ones(1)
    rows = recording.ledger.allocations
    assert rows.allocated[1] < rows.freed[0] < rows.allocated[2]
    assert before.numel() + after.numel() == 2


def test_a_recording_does_not_keep_tensors_alive():
    import weakref

    model = Stack()
    with evenload.record(model=model):
        loss = model(torch.randn(8, 32)).sum()
        node = weakref.ref(loss.untyped_storage())
        loss.backward()
        del loss
        assert node() is None
    parameter = weakref.ref(model.head.weight)
    del model
    gc.collect()
    assert parameter() is None
