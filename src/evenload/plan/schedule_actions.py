"""The words of a schedule: an operation, an action, the actions of every rank."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Op(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the input and of the weights."""
    BACKWARD_INPUT = "I"
    """Gradient of the input only; a `BACKWARD_WEIGHT` follows later."""
    BACKWARD_WEIGHT = "W"
    """Gradient of the weights; frees what forward kept."""


class Action(NamedTuple):
    """One forward or backward of one micro-batch through one chunk of the rank."""

    op: Op
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op}{self.micro_batch} of chunk {self.chunk}"


ActionList = tuple[tuple[Action, ...], ...]
"""Actions in order, indexed [rank]."""

SENDS_GRADIENT: Final = (Op.BACKWARD, Op.BACKWARD_INPUT)
"""Operations after which the stage before can start its backward."""


class Dependency(NamedTuple):
    """What another rank must have done before an action can start."""

    rank: int
    ops: tuple[Op, ...]
    """Any one of these."""
    chunk: int


def dependency(action: Action, rank: int, *, pp: int, interleave: int) -> Dependency | None:
    """What an action waits for on the rank it gets its input from, or None when its input is there from the start.

    Chunks are dealt to stages in a loop: the pipeline's chunk `g = chunk * pp + stage` feeds chunk `g + 1`.
    """
    place = action.chunk * pp + rank
    if action.op == Op.FORWARD:
        if place == 0:
            return None
        chunk, stage = divmod(place - 1, pp)
        return Dependency(stage, (Op.FORWARD,), chunk)
    if action.op == Op.BACKWARD_WEIGHT:
        return Dependency(rank, (Op.BACKWARD_INPUT,), action.chunk)
    if place == pp * interleave - 1:
        return Dependency(rank, (Op.FORWARD,), action.chunk)
    chunk, stage = divmod(place + 1, pp)
    return Dependency(stage, SENDS_GRADIENT, chunk)
