"""The garbage collector every so many steps, and what it freed."""

import gc

import pytest
import torch
from tests.record import leaks

from evenload.errors import EvenloadError
from evenload.record.periodic_gc import PeriodicGC
from evenload.units import MIB


@pytest.fixture(autouse=True)
def off():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_it_runs_every_so_many_steps_and_counts_the_bytes_that_it_freed():
    said = []
    collector = PeriodicGC(every=3, report=said.append)
    runs = []
    for step in range(7):
        leaks.holds_itself(step)
        runs.append(collector.step())
    assert [run is not None for run in runs] == [False, False, True, False, False, True, False]
    assert [(run.step, run.nbytes) for run in collector.runs] == [(3, 3 * MIB), (6, 3 * MIB)]
    assert said == collector.runs
    assert collector.nbytes == 6 * MIB
    assert collector.helps
    assert str(collector.runs[0]).startswith("step 3: the garbage collector freed 3.00 MiB of tensors (")


def test_memory_that_only_a_backward_graph_holds_is_counted():
    collector = PeriodicGC(every=1)
    leaks.keeps_output_with_backward(0)
    x = torch.ones(512, 512, requires_grad=True)
    leaks.Keeps.apply((x * 2).exp())
    del x
    freed = collector.step().nbytes  # x, its gradient, y; x, the saved result of exp, y; the factor 2
    assert freed == 3 * MIB + 3 * MIB + 8


def test_where_there_are_no_cycles_it_says_that_it_does_not_help():
    collector = PeriodicGC(every=1)
    assert collector.helps is None
    leaks.saves_output(0)
    collector()
    assert collector.helps is False
    assert collector.nbytes == 0


def test_as_a_context_manager_it_can_switch_the_automatic_runs_off():
    gc.enable()
    with PeriodicGC(every=10, automatic=False):
        assert not gc.isenabled()
    assert gc.isenabled()
    with PeriodicGC(every=10):
        assert gc.isenabled()
    gc.disable()
    with PeriodicGC(every=10, automatic=False):
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "3", None])
def test_a_number_of_steps_that_cannot_be_is_wrong_input(every):
    with pytest.raises(EvenloadError, match="not a number of steps"):
        PeriodicGC(every=every)


def test_cycles_along_one_graph_are_all_freed():
    """The collector alone frees one of them a pass."""
    x = torch.ones(512, 512, requires_grad=True)
    y = x
    for _ in range(4):
        y = leaks.Keeps.apply(y * 2)
    del x, y
    run = PeriodicGC(every=1).step()
    assert run.nbytes == 5 * MIB + 4 * 8  # x, four outputs, four factors 2
    assert run.passes >= 4
