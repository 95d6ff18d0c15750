"""Pipeline schedules as explicit action lists, one list a rank.

Filled in by the schedule work: `actions(name, pp, interleave, micro_batches)` and `validate`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """One forward or backward of one micro-batch through one chunk of the rank."""

    op: Op
    chunk: int
    micro_batch: int


ActionList = tuple[tuple[Action, ...], ...]
"""Actions in order, indexed [rank]."""
