"""Growth over steps, in ledgers written by hand: what is a leak, what is not, and what is said about it."""

import dataclasses

import numpy as np
import pytest
from tests.ledger.ledgers import allocations

from evenload.ledger.growth import LeakClass, growth, step_series
from evenload.ledger.ledger import ALIVE, HostLine, Ledger, Mark, Metadata, Owner
from evenload.ledger.series import Trend, judge
from evenload.ledger.words import Hold, MarkKind, Phase, Role
from evenload.units import MIB

STEP = 100


class Program:
    """Writes the ledger of a loop: one step is 100 events long, every call of `make` is one allocation."""

    def __init__(self, steps, *, marks=True):
        self.steps, self.marks = steps, marks
        self.rows, self.owners, self.strings, self.modules = [], [], {}, {}
        self.columns = {"roles": [], "source": [], "phase": [], "module": []}

    def make(self, step, size, line, *, lives=0, roles=Role.NONE, at=10, phase=Phase.FORWARD, module=None):
        """An allocation of `size` bytes in a step that is freed `lives` steps later; None: never."""
        begin = 1 + step * STEP + at
        freed = ALIVE if lives is None else begin + 50 + lives * STEP
        self.rows.append((size, begin, begin + 1, freed))
        self.columns["roles"].append(roles)
        self.columns["source"].append(self.strings.setdefault(line, len(self.strings)))
        self.columns["phase"].append(phase.code)
        self.columns["module"].append(-1 if module is None else self.modules.setdefault(module, len(self.modules)))
        return len(self.rows) - 1

    def own(self, row, hold, chain, source=None):
        self.owners.append((row, Owner(row=row, hold=hold, chain=chain, source=source)))

    def ledger(self, host=()):
        from evenload.ledger.ledger import Frame

        order = np.argsort([row[1] for row in self.rows], kind="stable")
        place = {int(old): new for new, old in enumerate(order)}
        return Ledger(
            metadata=Metadata(evenload="1", device="cpu"),
            allocations=allocations(
                *[self.rows[row] for row in order],
                **{name: [values[row] for row in order] for name, values in self.columns.items()},
            ),
            end=1 + self.steps * STEP,
            devices=("cpu",),
            strings=tuple(self.modules),
            frames=tuple(Frame(location=f"train.py:{line}", caller=-1) for line in self.strings),
            marks=tuple(
                Mark(kind=MarkKind.STEP, index=1 + step * STEP, time=step, value=step)
                for step in range(self.steps if self.marks else 0)
            ),
            host=tuple(host),
            owners=tuple(dataclasses.replace(owner, row=place[row]) for row, owner in self.owners),
        )


def healthy(steps=8, **options):
    """Parameters before, states in the first step, activations and gradients that go, a batch loaded ahead."""
    program = Program(steps, **options)
    program.make(0, 50 * MIB, 1, lives=None, at=-1, roles=Role.PARAMETER)
    program.make(0, 80 * MIB, 2, lives=None, at=60, roles=Role.OPTIMIZER)
    for step in range(steps):
        program.make(step, 9 * MIB, 3)
        program.make(step, 50 * MIB, 4, at=40, roles=Role.GRADIENT, lives=None if step == steps - 1 else 0)
        program.make(step, MIB, 5, lives=1)
    return program


@pytest.mark.parametrize("steps", [3, 4, 5, 8, 20])
def test_healthy_training_raises_no_alarm(steps):
    assert growth(healthy(steps).ledger()) == ()


@pytest.mark.parametrize("steps", [3, 5, 8, 20])
def test_what_every_step_leaves_behind_is_found_with_its_rate(steps):
    program = healthy(steps)
    for step in range(steps):
        program.make(step, 2 * MIB, 7, lives=None, at=20)
    [one] = growth(program.ledger(), capacity=10**9)
    assert one.leak is LeakClass.UNKNOWN
    assert one.per_step == 2 * MIB
    assert (one.since, one.count, one.nbytes) == (0, steps - 1, 2 * MIB * (steps - 1))
    assert one.source == "train.py:7"
    peak = 50 + 80 + 9 + 50 + 1 + 1 + 2 * steps
    assert one.full_at == pytest.approx(steps - 1 + (10**9 / MIB - peak) / 2, abs=2)


def test_a_buffer_of_fixed_length_is_no_leak():
    for length in (1, 2, 3, 5):
        program = healthy(12)
        for step in range(12):
            program.make(step, MIB, 7, lives=None if step + length > 12 else length)
        assert growth(program.ledger()) == (), length


@pytest.mark.parametrize("steps", [8, 9, 12])
def test_a_buffer_that_has_just_become_full_is_no_leak(steps):
    for length in range(3, steps - 1):
        program = healthy(steps)
        for step in range(steps):
            program.make(step, MIB, 7, lives=None if step + length >= steps else length)
        assert growth(program.ledger()) == (), length


def test_a_leak_whose_first_ones_were_given_back_is_found():
    program = healthy(12)
    for step in range(12):
        program.make(step, MIB, 7, lives=2 if step < 2 else None)
    [one] = growth(program.ledger())
    assert (one.since, one.nbytes) == (2, 9 * MIB)


def test_the_gradient_of_a_weight_does_not_hide_the_product_in_forward_that_stays():
    """A layer without a bias does both with the same operator, and `zero_grad` frees the gradient a step later."""
    program = healthy()
    for step in range(8):
        program.make(step, 8 * MIB, 7, lives=None, module="head")
        program.make(step, MIB, 7, lives=1, phase=Phase.BACKWARD, module="head")
    [one] = growth(program.ledger())
    assert (one.per_step, one.module) == (8 * MIB, "head")


def test_a_variable_of_the_loop_does_not_hide_what_stays_beside_it():
    program = healthy()
    for step in range(8):
        program.make(step, 8 * MIB, 7, lives=None)
        program.make(step, MIB, 7, lives=1, at=12)
        program.make(step, MIB, 7, lives=1, at=14)
    [one] = growth(program.ledger())
    assert one.per_step == pytest.approx(8 * MIB, rel=0.05)


def test_layers_that_leave_the_same_behind_are_one_leak_although_one_of_them_was_looked_up():
    program = healthy()
    for layer in range(40):
        rows = [program.make(step, MIB, 7, lives=None, module=f"layers.{layer}.mlp") for step in range(8)]
        if layer == 17:
            program.own(rows[3], Hold.RETAINED, "outputs[3] (variable of main)")
    [one] = growth(program.ledger())
    assert (one.per_step, one.module) == (40 * MIB, "layers.17.mlp")
    for layer in range(2):
        for step in range(8):
            program.make(step, MIB, 8, lives=None, module=f"layers.{layer}.norm")
    _, unowned = growth(program.ledger())
    assert (unowned.leak, unowned.per_step) == (LeakClass.UNKNOWN, 2 * MIB)


def test_a_bounded_container_that_is_not_full_yet_is_no_leak():
    for bound in ("deque(maxlen=100)", "lru_cache(maxsize=128)"):
        program = healthy()
        rows = [program.make(step, MIB, 7, lives=None) for step in range(8)]
        program.own(rows[0], Hold.RETAINED, f"replay {bound} -> Tensor")
        assert growth(program.ledger()) == ()


def test_a_leak_in_what_runs_every_few_steps_is_found():
    program = healthy(30)
    for step in range(2, 30, 9):
        program.make(step, 10 * MIB, 7, lives=None)
    [one] = growth(program.ledger())
    assert one.since == 2
    assert one.per_step == pytest.approx(10 * MIB * 4 / 28, rel=0.3)


def test_two_things_made_once_are_no_leak():
    program = healthy(20)
    program.make(3, 10 * MIB, 7, lives=None)
    program.make(14, 10 * MIB, 7, lives=None)
    assert growth(program.ledger()) == ()


def test_a_number_kept_per_step_is_harmless():
    program = healthy(50)
    for step in range(50):
        program.make(step, 64, 7, lives=None)
    assert growth(program.ledger()) == ()


def test_what_only_the_collector_freed_is_a_cycle():
    program = healthy()
    for step in range(8):
        program.make(step, MIB, 7, lives=3, roles=Role.COLLECTED)
    [one] = growth(program.ledger())
    assert one.leak is LeakClass.CYCLE
    assert "PeriodicGC" in one.fix


@pytest.mark.parametrize(
    ("hold", "chain", "leak", "fix"),
    [
        (Hold.RETAINED, "history[3] -> Tensor", LeakClass.RETAINED, "drop it when the step ends"),
        (Hold.RETAINED, "total -> grad_fn AddBackward0 -> SinBackward0.self", LeakClass.RETAINED, ".item()"),
        (Hold.RETAINED, "errors[2] -> ValueError.__traceback__ -> x", LeakClass.RETAINED, "text of the exception"),
        (Hold.CYCLE, "FBackward.kept -> grad_fn FBackward (a cycle)", LeakClass.CYCLE, "save_for_backward"),
        (Hold.UNREACHABLE, "nothing that Python can reach", LeakClass.UNCOLLECTABLE, "detached"),
    ],
)
def test_the_owner_names_the_class_and_the_fix(hold, chain, leak, fix):
    program = healthy()
    rows = [program.make(step, MIB, 7, lives=None) for step in range(8)]
    program.own(rows[2], hold, chain, "train.py:5")
    [one] = growth(program.ledger())
    assert (one.leak, one.owner, one.source, one.made_at) == (leak, chain, "train.py:5", "train.py:7")
    assert fix in one.fix


def test_places_that_the_same_variable_holds_are_one_leak():
    program = healthy()
    for line, chain in ((7, "total[1] -> a"), (8, "total[2] -> b"), (9, "other -> c")):
        rows = [program.make(step, MIB, line, lives=None) for step in range(8)]
        program.own(rows[0], Hold.RETAINED, chain)
    first, second = growth(program.ledger())
    assert (first.per_step, second.per_step) == (2 * MIB, MIB)
    assert first.owner.startswith("total")


def test_a_view_of_a_larger_storage_is_shown_as_such():
    program = healthy()
    for step in range(8):
        program.make(step, MIB, 7, lives=None)
    ledger = program.ledger()
    mine = ledger.allocations.source == list(program.strings).index(7)
    reach = np.where(mine, 2048, -1)
    [one] = growth(dataclasses.replace(ledger, allocations=dataclasses.replace(ledger.allocations, reach=reach)))
    assert (one.base, one.reach) == (MIB, 2048)
    assert ".clone()" in one.fix


def test_without_steps_what_one_place_leaves_again_and_again_is_found():
    program = healthy(12, marks=False)
    for step in range(12):
        program.make(step, MIB, 7, lives=None)
    [one] = growth(program.ledger())
    assert (one.per_step, one.since, one.nbytes) == (None, None, 12 * MIB)


def test_without_steps_data_that_a_program_loads_is_no_leak():
    program = healthy(12, marks=False)
    for step in range(12):
        program.make(step, MIB, 7, lives=None, phase=Phase.OTHER)
    assert growth(program.ledger()) == ()


def test_too_few_steps_decide_nothing():
    program = healthy(2)
    for step in range(2):
        program.make(step, MIB, 7, lives=None)
    assert growth(program.ledger()) == ()


def host_lines(rest, program):
    """Host lines of a process that holds `rest` bytes beside PyTorch's memory at the end of every step."""
    from evenload.ledger.curve import curve

    whole = curve(program.ledger())
    return [
        HostLine(step=step, index=(step + 1) * STEP, time=step, resident=whole.at((step + 1) * STEP) + extra, pinned=0)
        for step, extra in enumerate(rest)
    ]


def test_growth_outside_pytorch_is_seen_in_the_resident_set():
    program = healthy(10)
    [one] = growth(program.ledger(host_lines([10**9 + step * 3 * MIB for step in range(10)], program)))
    assert one.leak is LeakClass.OUTSIDE
    assert one.per_step == 3 * MIB


@pytest.mark.parametrize(
    "rest",
    [
        [10**9] * 10,
        [10**9 + min(step, 4) * 20 * MIB for step in range(10)],
        [10**9 + step * 50_000 for step in range(10)],
        [10**9 + (step % 2) * 30 * MIB for step in range(10)],
        [10**9 - step * MIB for step in range(10)],
    ],
)
def test_a_process_that_settles_swings_or_shrinks_is_healthy(rest):
    program = healthy(10)
    assert growth(program.ledger(host_lines(rest, program))) == ()


def test_gaps_between_tensors_on_the_host_are_no_growth_outside_pytorch():
    program = healthy(10)
    lines = host_lines([10**9 + step * 3 * MIB for step in range(10)], program)
    gaps = [dataclasses.replace(line, idle=5 * MIB + line.step * 3 * MIB) for line in lines]
    assert growth(program.ledger(gaps)) == ()
    few = [dataclasses.replace(line, idle=5 * MIB + line.step * MIB) for line in lines]
    [one] = growth(program.ledger(few))
    assert (one.leak, one.per_step) == (LeakClass.OUTSIDE, 2 * MIB)


@pytest.mark.parametrize("known", [True, False])
def test_beside_tensors_that_stay_a_process_grows_a_little_more(known):
    program = healthy(10)
    for step in range(10):
        program.make(step, 10 * MIB, 7, lives=None)
    for around, alarmed in ((MIB, False), (5 * MIB, known), (30 * MIB, True)):
        lines = host_lines([10**9 + step * around for step in range(10)], program)
        lines = [dataclasses.replace(line, idle=0 if known else -1) for line in lines]
        found = {one.leak for one in growth(program.ledger(lines))}
        assert (LeakClass.OUTSIDE in found) is alarmed, around


def test_what_comes_after_the_last_step_is_no_step():
    def steps(*phases):
        marks = [Mark(kind=MarkKind.STEP, index=index, time=0) for index in (1, 101, 201)]
        marks += [Mark(kind=MarkKind.PHASE, index=index, time=0, value=phase.code) for index, phase in phases]
        return dataclasses.replace(healthy(3).ledger(), marks=tuple(marks)).steps

    assert steps((5, Phase.FORWARD), (105, Phase.FORWARD), (150, Phase.OTHER), (210, Phase.OTHER)) == 2
    assert steps((5, Phase.FORWARD), (105, Phase.FORWARD), (205, Phase.FORWARD)) == 3
    assert steps() == 3


def test_the_memory_between_steps_and_the_peaks_are_a_series():
    program = healthy(10)
    for step in range(10):
        program.make(step, step * 30 * MIB, 7)
    series = step_series(program.ledger())
    assert judge(series).trend is Trend.IMBALANCE
    for step in range(10):
        program.make(step, 5 * MIB, 8, lives=None)
    series = step_series(program.ledger())
    assert judge(series).trend is Trend.GROWTH
    assert judge(series).per_step == 5 * MIB
    assert step_series(healthy(2).ledger()) is None
