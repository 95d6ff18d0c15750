"""Dead but held at the peak: what, since when, until when, by whom."""

import dataclasses

import numpy as np
from tests.ledger.ledgers import BACKWARD, FORWARD, OTHER, allocations, step

from evenload.ledger.held import doing, held_after_use
from evenload.ledger.ledger import ALIVE, Ledger, Mark, Metadata, Owner
from evenload.ledger.words import Category, Hold, MarkKind


def program():
    """Logits that forward uses last and a variable holds through backward, beside what backward still needs."""
    return Ledger(
        metadata=Metadata(evenload="1", device="cpu"),
        allocations=allocations(
            (1000, 0, 90, ALIVE),  # a weight
            (600, 10, 20, 70),  # logits, dead from 21 on
            (50, 11, 21, 70),  # as dead, and small
            (500, 12, 60, 61),  # an activation that backward reads
            (400, 40, 55, 58),  # the peak
            category=[
                category.code
                for category in (
                    Category.PARAMETER,
                    Category.ACTIVATION,
                    Category.ACTIVATION,
                    Category.ACTIVATION,
                    Category.TEMPORARY,
                )
            ],
            operator=[-1, 0, 1, 1, 1],
            module=[-1, 2, 2, 2, 2],
        ),
        end=100,
        strings=("aten.mm", "aten.mul", "head"),
        devices=("cpu",),
        marks=(
            Mark(kind=MarkKind.STEP, index=5, time=0, value=3),
            Mark(kind=MarkKind.PHASE, index=9, time=0, value=FORWARD, micro_batch=1),
            Mark(kind=MarkKind.PHASE, index=30, time=0, value=BACKWARD, micro_batch=1),
            Mark(kind=MarkKind.PHASE, index=65, time=0, value=0),
        ),
        owners=(Owner(row=1, hold=Hold.RETAINED, chain="outputs (variable of train)"),),
    )


def test_what_is_dead_at_the_peak_is_told_from_what_is_used_later():
    [logits, small] = held_after_use(program())
    assert (logits.nbytes, logits.operator, logits.module) == (600, "aten.mm", "head")
    assert (logits.dead_since, logits.freed_in) == ("forward", "between phases")
    assert logits.owner == "outputs (variable of train)"
    assert (small.nbytes, small.owner) == (50, None)


def test_small_ones_can_be_left_out_and_another_point_can_be_asked_about():
    assert [one.nbytes for one in held_after_use(program(), share=0.1)] == [600]
    assert held_after_use(program(), 15) == ()


def test_weights_are_used_again_and_are_not_dead():
    late = dataclasses.replace(program().allocations, last_used=np.array([1, 20, 21, 60, 55]))
    assert [one.nbytes for one in held_after_use(dataclasses.replace(program(), allocations=late))] == [600, 50]


def test_what_is_never_freed_says_so():
    never = dataclasses.replace(program().allocations, freed=np.array([ALIVE, ALIVE, 70, 61, 58]))
    assert held_after_use(dataclasses.replace(program(), allocations=never))[0].freed_in == "never"


def test_a_point_is_told_by_phase_step_and_micro_batch():
    assert doing(program(), 40) == "backward of step 3, micro-batch 1"
    assert doing(program(), 2) == "between phases"
    assert doing(step(), 12) == "backward of step 0, micro-batch 0"


def test_a_ledger_without_uses_has_nothing_dead():
    rows = dataclasses.replace(program().allocations, last_used=np.zeros(5, np.int64))
    assert held_after_use(dataclasses.replace(program(), allocations=rows)) == ()


def test_what_outlives_its_step_is_freed_in_a_later_one_or_at_the_end():
    phases = [(5, FORWARD), (25, BACKWARD), (45, FORWARD), (65, BACKWARD), (90, OTHER)]
    marks = [Mark(kind=MarkKind.STEP, index=index, time=0) for index in (1, 40, 90)]
    marks += [Mark(kind=MarkKind.PHASE, index=index, time=0, value=phase) for index, phase in phases]
    for freed, name in ((35, "backward"), (50, "a later step"), (95, "the end"), (ALIVE, "never")):
        ledger = Ledger(
            metadata=Metadata(evenload="1", device="cpu"),
            allocations=allocations((100, 6, 8, freed), (9, 7, 30, 31), phase=[FORWARD] * 2),
            end=100,
            marks=tuple(marks),
        )
        assert [one.freed_in for one in held_after_use(ledger, 20)] == [name]
