"""Schedules that PyTorch runs, by the house's names, and the rules that they have."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from evenload.errors import EvenloadError, did_you_mean, shown
from evenload.runtime.placement import Style


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What a schedule asks for."""

    text: str
    """The rule, with the sizes in it: it may use {pp}, {interleave} and {micro_batches}."""
    holds: Callable[[int, int, int], bool]
    """(pp, interleave, micro_batches) -> whether it is kept."""
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchSchedule:
    """A schedule of `torch.distributed.pipelining`."""

    name: str
    """The house's name."""
    torch_name: str
    """PyTorch's name of the class, for `get_schedule_class`."""
    rules: tuple[Rule, ...] = ()
    style: Style = "loop"
    """Which rank holds which chunk."""
    several: bool = True
    """Whether its class takes a list of stages."""
    parts: bool = False
    """Whether backward comes in parts, inputs first and weights later: zero-bubble schedules."""
    aliases: tuple[str, ...] = ()


_ONE_CHUNK: Final = Rule(
    text="it runs one chunk per stage, and interleave is {interleave}",
    holds=lambda _pp, interleave, _m: interleave == 1,
    fix="use interleaved_1f1b, or set interleave to 1",
)
_TWO_CHUNKS: Final = Rule(
    text="it runs two chunks per stage, and interleave is {interleave}",
    holds=lambda _pp, interleave, _m: interleave == 2,
    fix="set interleave to 2",
)
_ROUNDS: Final = Rule(
    text="{micro_batches} micro-batches do not divide into max(1, {micro_batches} // {pp}) equal rounds",
    holds=lambda pp, _i, m: m % max(1, m // pp) == 0,
    fix="use a multiple of pp",
)
_FILL: Final = Rule(
    text="it needs as many micro-batches as stages, {pp}, and has {micro_batches}",
    holds=lambda pp, _i, m: m >= pp,
    fix="raise micro_batches, or use gpipe",
)
_FILL_CHUNKS: Final = Rule(
    text="it needs as many micro-batches as chunks, {pp} x {interleave}, and has {micro_batches}",
    holds=lambda pp, interleave, m: m >= pp * interleave,
    fix="raise micro_batches",
)

_ALL: Final = (
    TorchSchedule(name="gpipe", torch_name="GPipe", rules=(_ONE_CHUNK,), several=False),
    TorchSchedule(name="1f1b", torch_name="1F1B", rules=(_ONE_CHUNK, _FILL), several=False, aliases=("one_f_one_b",)),
    TorchSchedule(name="interleaved_1f1b", torch_name="Interleaved1F1B", rules=(_ROUNDS,), aliases=("interleaved",)),
    TorchSchedule(name="looped_bfs", torch_name="LoopedBFS", aliases=("breadth_first",)),
    TorchSchedule(
        name="interleaved_zero_bubble",
        torch_name="InterleavedZeroBubble",
        rules=(_ROUNDS,),
        parts=True,
        aliases=("zero_bubble",),
    ),
    TorchSchedule(
        name="zbv",
        torch_name="ZBVZeroBubble",
        rules=(_TWO_CHUNKS,),
        style="v",
        parts=True,
        aliases=("zero_bubble_v", "zbv_zero_bubble"),
    ),
    TorchSchedule(
        name="dualpipe_v",
        torch_name="DualPipeV",
        rules=(_TWO_CHUNKS, _FILL_CHUNKS),
        style="v",
        parts=True,
    ),
)

SCHEDULES: Final = {schedule.name: schedule for schedule in _ALL}
"""Every schedule that a run can have, by name."""


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("schedule")


_BY_KEY: Final = {
    _key(alias): schedule for schedule in _ALL for alias in (schedule.name, schedule.torch_name, *schedule.aliases)
}


def torch_schedule(name: object, *, pp: int, interleave: int, micro_batches: int) -> TorchSchedule:
    """The schedule of a name, with its rules checked.

    `1f1b` with more than one chunk per stage is `interleaved_1f1b`, as in a plan.

    Raises:
        EvenloadError: PyTorch has no such schedule, or the sizes break one of its rules.
    """
    schedule = _BY_KEY.get(_key(name)) if isinstance(name, str) else None
    if schedule is None:
        raise EvenloadError(
            f"torch.distributed.pipelining has no schedule {shown(name)}",
            where="$.schedule",
            fix=did_you_mean(str(name).lower(), list(SCHEDULES)) or f"use one of {', '.join(SCHEDULES)}",
        )
    if schedule.name == "1f1b" and interleave > 1:
        schedule = SCHEDULES["interleaved_1f1b"]
    for rule in schedule.rules:
        if not rule.holds(pp, interleave, micro_batches):
            fact = rule.text.format(pp=pp, interleave=interleave, micro_batches=micro_batches)
            raise EvenloadError(f"{schedule.name} cannot run so: {fact}", where="$.schedule", fix=rule.fix)
    return schedule
