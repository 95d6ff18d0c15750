"""Pipeline schedules by name, as explicit action lists, one list a rank.

`actions` gives the list, `validate` checks any list, `SCHEDULES` says what there is. What an order means is written in
`docs/schedules.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from evenload.errors import EvenloadError, did_you_mean
from evenload.plan import schedule_orders as orders
from evenload.plan.schedule_actions import SENDS_GRADIENT, Action, ActionList, Dependency, Op, dependency
from evenload.plan.schedule_check import validate

__all__ = [
    "SCHEDULES",
    "SENDS_GRADIENT",
    "Action",
    "ActionList",
    "Dependency",
    "Op",
    "Schedule",
    "actions",
    "default_schedule",
    "dependency",
    "find_schedule",
    "validate",
]

MOST_ACTIONS: Final = 2**20
"""Longer action lists are refused: no run has them, and they would take tens of seconds to simulate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One way to order the actions of a pipeline."""

    name: str
    summary: str
    order: Callable[[int, int, int], ActionList]
    """(pp, interleave, micro_batches) -> the actions of every rank."""
    aliases: tuple[str, ...] = ()
    """What frameworks call it."""
    one_chunk: bool = False
    """Runs one chunk per stage only."""
    plain_on_one_chunk: bool = False
    """On one chunk per stage it is `1f1b`."""


_ALL: Final = (
    Schedule(
        name="gpipe",
        summary="all forwards, then all backwards",
        order=orders.gpipe,
        aliases=("ScheduleGPipe",),
        one_chunk=True,
    ),
    Schedule(
        name="1f1b",
        summary="one forward, one backward",
        order=orders.one_f_one_b,
        aliases=("Schedule1F1B", "one_f_one_b"),
        one_chunk=True,
    ),
    Schedule(
        name="interleaved_1f1b",
        summary="one forward, one backward over several chunks per stage, in PyTorch's order",
        order=orders.interleaved,
        aliases=("ScheduleInterleaved1F1B", "interleaved"),
    ),
    Schedule(
        name="mindspore_interleaved",
        summary="interleaved 1F1B in MindSpore's order: micro-batches left over join the first round",
        order=orders.interleaved_remainder_first,
        aliases=("mindspore_interleaved_1f1b", "vpp"),
        plain_on_one_chunk=True,
    ),
    Schedule(
        name="interleaved_1f1b_less_memory",
        summary="interleaved 1F1B with a short warm-up: less memory, more waiting",
        order=orders.interleaved_less_memory,
        aliases=("less_memory", "vpp2", "mindspore_interleaved_less_memory"),
        plain_on_one_chunk=True,
    ),
)

SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType({schedule.name: schedule for schedule in _ALL})
"""Every schedule by name."""

_NOT_YET: Final = (
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "ZeroBubbleV",
    "DualPipeV",
    "seqpipe",
    "seqvpp",
    "seqsmartvpp",
)
"""Schedules that people use and that evenload does not know yet."""


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise EvenloadError(
            f"schedule is {name!r}", where="$.schedule", fix="give the name of a schedule, such as 1f1b"
        )
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_KEY: Final = {_key(alias): schedule for schedule in _ALL for alias in (schedule.name, *schedule.aliases)}


def default_schedule(interleave: int, *, less_memory: bool = False) -> str:
    """Name of the schedule that fits a number of chunks per stage when the user names none."""
    if interleave == 1:
        return "1f1b"
    return "interleaved_1f1b_less_memory" if less_memory else "interleaved_1f1b"


def find_schedule(name: str, *, interleave: int | None = None) -> Schedule:
    """The schedule of a name or alias; case, dashes and underscores do not matter.

    Frameworks write `1f1b` for any number of chunks, so `1f1b` with more than one is `interleaved_1f1b`. On one chunk
    MindSpore's orders are plain `1f1b`.

    Args:
        name: what the user wrote.
        interleave: chunks per stage; None: not known, the name is taken as it is.

    Raises:
        EvenloadError: no such schedule, one that is not there yet, or one that runs a single chunk per stage.
    """
    schedule = _BY_KEY.get(_key(name))
    if schedule is None:
        raise _unknown(name)
    if interleave is None:
        return schedule
    if interleave == 1:
        return SCHEDULES["1f1b"] if schedule.plain_on_one_chunk else schedule
    if schedule.name == "1f1b":
        return SCHEDULES["interleaved_1f1b"]
    if schedule.one_chunk:
        raise EvenloadError(
            f"{schedule.name} runs one chunk per stage, interleave is {interleave}",
            where="$.schedule",
            fix="use interleaved_1f1b, or set interleave to 1",
        )
    return schedule


def actions(name: str, *, pp: int, interleave: int = 1, micro_batches: int) -> ActionList:
    """The actions of every rank, in order.

    Args:
        name: a schedule of `SCHEDULES` or one of its aliases.
        pp: pipeline stages, one a rank.
        interleave: chunks per stage.
        micro_batches: micro-batches per step, any number of at least 1.

    Raises:
        EvenloadError: no such schedule, or sizes that are not whole numbers of at least 1 or far too large.

    Examples:
        >>> [str(action) for action in actions("1f1b", pp=2, micro_batches=2)[0]]
        ['F0 of chunk 0', 'F1 of chunk 0', 'B0 of chunk 0', 'B1 of chunk 0']
    """
    for word, value in (("pp", pp), ("interleave", interleave), ("micro_batches", micro_batches)):
        _check_size(word, value)
    schedule = find_schedule(name, interleave=interleave)
    if 2 * pp * interleave * micro_batches > MOST_ACTIONS:
        raise EvenloadError(
            f"pp {pp} x interleave {interleave} x {micro_batches} micro-batches are more than {MOST_ACTIONS} actions",
            where="$.micro_batches",
            fix="simulate fewer micro-batches: the steady state repeats",
        )
    return _actions(schedule.name, pp, interleave, micro_batches)


def _check_size(word: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EvenloadError(f"{word} is {value!r}", where=f"$.{word}", fix="give a whole number of at least 1")


@lru_cache(maxsize=64)
def _actions(name: str, pp: int, interleave: int, micro_batches: int) -> ActionList:
    return SCHEDULES[name].order(pp, interleave, micro_batches)


def _unknown(name: str) -> EvenloadError:
    if _key(name).removeprefix("schedule") in map(_key, _NOT_YET):
        return EvenloadError(
            f"the schedule {name!r} is not there yet", where="$.schedule", fix=f"use one of {', '.join(SCHEDULES)}"
        )
    known = [alias for schedule in _ALL for alias in (schedule.name, *schedule.aliases)]
    fix = did_you_mean(name.lower(), known) or f"use one of {', '.join(SCHEDULES)}"
    return EvenloadError(f"there is no schedule {name!r}", where="$.schedule", fix=fix)
