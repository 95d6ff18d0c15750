"""When nothing fits: other degrees and schedules, and the memory that the leanest plan needs with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from evenload.errors import EvenloadError
from evenload.plan.plan import Plan
from evenload.planner.problem import Problem
from evenload.planner.ranks import Ranks
from evenload.planner.verdict import shortage
from evenload.profile.profile import Profile
from evenload.setup import Setup

FACTORS: Final = (2, 4, 8)
"""Degrees are tried at so many times what they are."""

ProfileOf = Callable[[Setup], Profile]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One change of the setup."""

    name: str
    """The change, in words."""
    needed: float
    """The limit that the leanest plan found needs after it."""
    fits: bool
    """Whether that is within the limit."""
    plan: Plan
    """That plan: simulated again, its fullest rank needs `needed`."""


def remedies(problem: Problem, profile_of: ProfileOf | None = None) -> tuple[Remedy, ...]:
    """What single changes would need, those that fit first, then by memory.

    Args:
        problem: what nothing fits for.
        profile_of: the profile under another setup; None: a table, whose costs stay as they are.
    """
    found: list[Remedy] = []
    for name, setup in _changes(problem.setup, degrees=profile_of is not None):
        try:
            profile = problem.profile if profile_of is None else profile_of(setup)
            lean = shortage(Ranks(replace(problem, profile=profile, setup=setup)))
        except EvenloadError:
            continue  # degrees that do not divide, more chunks than layers
        found.append(Remedy(name=name, needed=lean.needed, fits=lean.needed <= problem.limit, plan=lean.plan))
    return tuple(sorted(found, key=lambda remedy: (not remedy.fits, remedy.needed)))


def _changes(setup: Setup, *, degrees: bool) -> Iterator[tuple[str, Setup]]:
    for factor in FACTORS:
        yield f"--pp {factor * setup.pp}", replace(setup, pp=factor * setup.pp)
    if setup.interleave > 1:
        yield "--interleave 1", replace(setup, interleave=1, schedule="1f1b")
        if setup.schedule != "interleaved_1f1b_less_memory":
            yield "--less-memory", replace(setup, schedule="interleaved_1f1b_less_memory")
    if not degrees:
        return
    for factor in FACTORS:
        yield f"--tp {factor * setup.tp}", replace(setup, tp=factor * setup.tp)
    if setup.tp > 1 and not setup.sequence_parallel:
        yield "--sequence-parallel", replace(setup, sequence_parallel=True)
    if setup.zero == 0 and setup.dp * setup.cp > 1:
        yield "--zero 1", replace(setup, zero=1)
    if setup.micro_batch > 1:
        half = setup.micro_batch // 2
        yield (
            f"--micro-batch {half} --micro-batches {2 * setup.micro_batches}",
            replace(setup, micro_batch=half, micro_batches=2 * setup.micro_batches),
        )
