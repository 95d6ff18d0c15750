"""Public reports about memory that is not released, re-created small: what evenload says about each."""

import pytest
import torch
from tests.ledger.oom_texts import FRAGMENTED
from tests.record import leaks
from tests.record.test_unreleased import run

from evenload.ledger.growth import LeakClass
from evenload.ledger.oom import read_oom
from evenload.ledger.oom_reasons import explain
from evenload.ledger.series import Series, Trend, judge
from evenload.ledger.settings import read_alloc_conf
from evenload.record.periodic_gc import PeriodicGC
from evenload.units import MIB


@pytest.mark.parametrize(("body", "mib"), [(leaks.keeps_output, 2), (leaks.keeps_output_with_backward, 3)])
def test_an_output_in_an_attribute_of_the_context_is_a_cycle(body, mib):
    """pytorch/pytorch#25340, #5569: memory grows until the collector runs; save_for_backward does not leak."""
    [one] = run(body)
    assert one.leak is LeakClass.CYCLE
    assert one.per_step == mib * MIB
    assert one.owner.startswith("KeepsBackward.kept")
    assert "ctx.save_for_backward" in one.fix
    assert run(leaks.saves_output) == ()


def test_a_lambda_in_a_module_that_refers_to_the_module_is_a_cycle():
    """pytorch/pytorch#28647: the module is made anew in every iteration, and only the collector frees it."""
    [one] = run(leaks.module_with_lambda)
    assert (one.leak, one.per_step) == (LeakClass.CYCLE, MIB)
    assert run(leaks.module_without_lambda) == ()


def test_a_sum_of_losses_holds_the_graphs_of_those_without_backward_only():
    """BatsResearch/labelmodels#4, horovod#641: `total += loss` leaks only where backward has not freed the graph."""
    w = torch.ones(512, 512, requires_grad=True)
    total = torch.zeros(())

    def step(number, *, backward=False, item=False):
        nonlocal total
        loss = (w * 1.5).sin().sum()
        if backward:
            loss.backward()
        total = total + (loss.item() if item else loss)

    [one] = run(step)
    assert (one.leak, one.per_step) == (LeakClass.RETAINED, MIB)
    assert one.owner.startswith("total (variable of ")
    total = torch.zeros(())
    assert run(lambda number: step(number, backward=True)) == ()
    assert run(lambda number: step(number, item=True)) == ()


def test_objects_that_refer_to_themselves_say_what_the_collector_would_free():
    """pytorch/pytorch#50185: out of memory although almost everything is unreachable."""
    [one] = run(leaks.holds_itself)
    assert (one.leak, one.per_step, one.nbytes) == (LeakClass.CYCLE, MIB, one.count * MIB)
    assert one.count >= 6
    for number in range(5):
        leaks.holds_itself(number)
    assert PeriodicGC(every=1).collect().nbytes >= 5 * MIB - 1


def test_a_row_of_a_batch_keeps_the_whole_batch():
    """A common pattern without a thread of its own: the view holds 1 MiB, the clone 2 KiB."""
    keep = []
    [one] = run(lambda number: keep.append(torch.empty(512, 512)[0]))
    assert (one.per_step, one.base, one.reach) == (MIB, MIB, 2048)


def test_memory_that_grows_at_every_save_overflows_at_the_next_one():
    """axolotl-ai-cloud/axolotl#3596: it is the saving that keeps memory, not the training."""
    samples = Series(
        baseline=tuple(value * MIB for value in (49258, 61558, 76124)),
        event="after each checkpoint save",
        capacity=81559 * MIB,
    )
    found = judge(samples)
    assert found.trend is Trend.GROWTH
    assert [change / MIB for change in found.increments] == [12300, 14566]
    assert found.next_overflows


def test_a_peak_that_drifts_is_no_leak_while_the_baseline_is_flat():
    """databricks/megablocks#154: experts without dropping, routed unevenly."""
    samples = Series(baseline=(30e9,) * 3, peak=(33e9, 34e9, 80e9), at=(0, 500, 5000))
    assert judge(samples).trend is Trend.IMBALANCE


def test_the_option_that_is_on_is_not_recommended():
    """pytorch/pytorch#173049: the message itself recommends what is on."""
    [message] = read_oom(FRAGMENTED)
    found = explain(message, read_alloc_conf("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"))
    assert all(advice.setting is None for advice in found.advice)
    assert any("which is on already" in fact for fact in found.facts)
