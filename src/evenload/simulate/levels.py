"""The actions of a schedule in topological levels: worked out once for a schedule, whatever the durations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError
from evenload.plan.schedule import Action, ActionList, Op, dependency

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Actions renumbered so that each level is one block of positions and depends on earlier levels only."""

    bounds: tuple[tuple[int, int], ...]
    """First and last + 1 position of every level."""
    order: Ints
    """Position -> action, where actions are counted rank after rank in the order they run."""
    before: Ints
    """Position of the action before on the same rank; N for none."""
    feeds: Ints
    """Position of the action on another rank that makes the input; N + 1 for none."""
    duration: Ints
    """Row of the durations, [forward and backward, chunk, stage] flattened."""


def levels(actions: ActionList, *, interleave: int) -> Levels:
    """Levels of a schedule.

    Raises:
        EvenloadError: the actions cannot run in the order given.
    """
    pp = len(actions)
    if not all(actions) or not pp:
        raise EvenloadError("a rank of the schedule has no actions", where="$", fix="give every rank its actions")
    before, feeds = _predecessors(actions, interleave)
    level = _level(before, feeds, [len(order) for order in actions])
    rank = np.repeat(np.arange(pp), [len(order) for order in actions])
    order = np.lexsort((rank, level))
    total = len(order)
    position = np.arange(total + 2)  # the last two stand for "nothing before" and "nothing feeds it"
    position[order] = np.arange(total)
    row = [
        (action.chunk if action.op == Op.FORWARD else interleave + action.chunk) * pp + stage
        for stage, actions_of_rank in enumerate(actions)
        for action in actions_of_rank
    ]
    return Levels(
        bounds=tuple(pairwise([0, *np.cumsum(np.bincount(level)).tolist()])),
        order=order,
        before=position[before[order]],
        feeds=position[feeds[order]],
        duration=np.array(row, dtype=np.int64)[order],
    )


def _predecessors(actions: ActionList, interleave: int) -> tuple[Ints, Ints]:
    """For every action: the one before on its rank (N for none), the one that feeds it from another rank (N + 1)."""
    pp = len(actions)
    flat = [(rank, action) for rank, order in enumerate(actions) for action in order]
    number = {key: index for index, key in enumerate(flat)}
    before = np.arange(-1, len(flat) - 1)
    feeds = np.full(len(flat), len(flat) + 1)
    for index, (rank, action) in enumerate(flat):
        if index == 0 or flat[index - 1][0] != rank:
            before[index] = len(flat)
        needs = dependency(action, rank, pp=pp, interleave=interleave)
        if needs is not None and needs.rank != rank:  # on one rank the order of the list says it already
            makers = ((needs.rank, Action(op, needs.chunk, action.micro_batch)) for op in needs.ops)
            feeds[index] = next((number[maker] for maker in makers if maker in number), -1)
    return before, feeds


def _level(before: Ints, feeds: Ints, lengths: list[int]) -> Ints:
    """Number of actions on the longest chain that leads to each action."""
    total = len(before)
    before_of: list[int] = before.tolist()
    feeds_of: list[int] = feeds.tolist()
    level = [-1] * (total + 2)
    at: list[int] = [0, *np.cumsum(lengths).tolist()]
    end = at[1:]
    moved = True
    while moved:
        moved = False
        for rank, stop in enumerate(end):
            index = at[rank]
            while index < stop:
                feed = feeds_of[index]
                if feed < total and (feed < 0 or level[feed] < 0):
                    break  # what feeds it comes later, or never
                level[index] = 1 + max(level[before_of[index]], level[feed])
                index += 1
            moved |= index > at[rank]
            at[rank] = index
    if at[:-1] != end:
        raise EvenloadError("the schedule cannot run: ranks wait for each other", fix="validate() names the place")
    return np.array(level[:total], dtype=np.int64)
