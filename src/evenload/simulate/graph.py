"""The fixed graph of a schedule: who waits for whom, worked out once, then run for many plans at a time.

An action starts when the action before it on its rank has ended and its input has arrived. Both are known from the
schedule alone, so a graph serves every plan that shares the schedule; durations are arrays over the plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.errors import EvenloadError
from evenload.plan import schedule as schedules
from evenload.plan.schedule import ActionList, Op
from evenload.simulate.inflight import InFlight, in_flight
from evenload.simulate.levels import Levels, levels

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK: Final = 64
"""Plans run together: the end times of a block stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Times of every action of K plans, and of the step."""

    start: Floats
    """[K, action], actions in the order of `ActionGraph.rank` and its sisters."""
    end: Floats
    """[K, action]."""
    step_time: Floats
    """[K]: when the last action ends."""


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """A longest path through one run: these actions, in this order, take the whole step.

    The path exists for every plan of the schedule, so the step of any plan takes at least
    `sum(forward * its forward times) + sum(backward * its backward times) + transfers * its transfer time`.
    """

    forward: Ints
    """[chunk, stage]: forwards on the path."""
    backward: Ints
    """[chunk, stage]: backwards on the path."""
    transfers: int
    """Sends from one rank to another on the path."""

    def length(self, forward: ArrayLike, backward: ArrayLike, transfer: float = 0.0) -> Floats:
        """Length of the path under other durations [..., chunk, stage]: a lower bound on their step time."""
        work = np.asarray(forward) * self.forward + np.asarray(backward) * self.backward
        return np.asarray(work.sum(axis=(-2, -1)) + self.transfers * transfer)


@dataclass(frozen=True, eq=False)
class ActionGraph:
    """Dependencies of a schedule's actions.

    Transfers between ranks are latency on the edge and keep neither rank busy (non-blocking sends and receives).

    Examples:
        >>> graph = ActionGraph.scheduled("1f1b", pp=2, micro_batches=4)
        >>> graph.step_times([[1.0, 1.0]], [[2.0, 2.0]]).tolist()
        [15.0]
    """

    actions: ActionList

    @classmethod
    def of(cls, actions: ActionList) -> ActionGraph:
        """The graph of any action list; check the list first with `evenload.plan.schedule.validate`."""
        return cls(actions)

    @classmethod
    def scheduled(cls, name: str, *, pp: int, interleave: int = 1, micro_batches: int) -> ActionGraph:
        """The graph of a named schedule; made once for each schedule and size.

        Raises:
            EvenloadError: no such schedule, or sizes it does not allow.
        """
        schedules.actions(name, pp=pp, interleave=interleave, micro_batches=micro_batches)
        resolved = schedules.find_schedule(name, interleave=interleave).name
        return _scheduled(resolved, pp, interleave, micro_batches)

    @property
    def pp(self) -> int:
        """Pipeline stages, one a rank."""
        return len(self.actions)

    @cached_property
    def interleave(self) -> int:
        """Chunks per stage."""
        return 1 + max((action.chunk for order in self.actions for action in order), default=0)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return 1 + max((action.micro_batch for order in self.actions for action in order), default=0)

    @cached_property
    def rank(self) -> Ints:
        """Rank of every action, rank after rank in the order they run."""
        return np.repeat(np.arange(self.pp), [len(order) for order in self.actions])

    @cached_property
    def chunk(self) -> Ints:
        """Chunk of every action."""
        return np.array([action.chunk for order in self.actions for action in order], dtype=np.int64)

    @cached_property
    def is_forward(self) -> NDArray[np.bool_]:
        """Whether an action is a forward."""
        return np.array([action.op == Op.FORWARD for order in self.actions for action in order], dtype=bool)

    @cached_property
    def in_flight(self) -> tuple[InFlight, ...]:
        """What every rank holds at its fullest moments."""
        return tuple(in_flight(order, interleave=self.interleave) for order in self.actions)

    @cached_property
    def in_flight_with_births(self) -> tuple[InFlight, ...]:
        """The same where gradients come to be in the first backward of a chunk."""
        return tuple(in_flight(order, interleave=self.interleave, births=True) for order in self.actions)

    def moments(self, *, births: bool) -> tuple[InFlight, ...]:
        """`in_flight`, or `in_flight_with_births`."""
        return self.in_flight_with_births if births else self.in_flight

    def run(self, forward: ArrayLike, backward: ArrayLike, transfer: float = 0.0) -> Run:
        """Start and end of every action.

        Args:
            forward: forward time of every chunk, [chunk, stage] for one plan or [K, chunk, stage].
            backward: backward time (what is recomputed included), same shape.
            transfer: time from the end of an action to the arrival of its result on another rank.

        Raises:
            EvenloadError: wrong shape, a time that is negative or not finite, or a backward in two parts.
        """
        times = self._times(forward, backward, transfer)
        ends = self._ends(times, transfer)
        by_level = self._levels
        end = np.empty((times.shape[1], len(by_level.order)))
        end[:, by_level.order] = ends[:-2].T
        start = self._starts(ends, transfer)
        return Run(start=start, end=end, step_time=end.max(axis=1))

    def step_times(self, forward: ArrayLike, backward: ArrayLike, transfer: float = 0.0) -> Floats:
        """Step time of every plan, [K]: `run` without the start and end of single actions, and faster.

        Raises:
            EvenloadError: as `run`.
        """
        times = self._times(forward, backward, transfer)
        last, steps = self._last, np.empty(times.shape[1])
        for first in range(0, len(steps), BLOCK):
            block = np.ascontiguousarray(times[:, first : first + BLOCK])
            steps[first : first + BLOCK] = self._ends(block, transfer)[last].max(axis=0)
        return steps

    def critical_path(self, forward: ArrayLike, backward: ArrayLike, transfer: float = 0.0) -> CriticalPath:
        """A longest path of one plan, as counts of forwards and backwards of each chunk.

        Args:
            forward: forward time of every chunk, [chunk, stage].
            backward: backward time, same shape.
            transfer: as in `run`.

        Raises:
            EvenloadError: as `run`, or more than one plan.
        """
        times = self._times(forward, backward, transfer)
        if times.shape[1] != 1:
            raise EvenloadError(f"a critical path is that of one plan, not of {times.shape[1]}", where="$.forward")
        ends = self._ends(times, transfer)[:, 0]
        by_level = self._levels
        counts = np.zeros(times.shape[0], dtype=np.int64)
        transfers = 0
        at, nothing = int(ends.argmax()), len(by_level.order)
        while at < nothing:
            counts[by_level.duration[at]] += 1
            before, feeds = int(by_level.before[at]), int(by_level.feeds[at])
            arrived = ends[feeds] + transfer
            transfers += arrived > ends[before]
            at = feeds if arrived > ends[before] else before
        forwards, backwards = counts.reshape(2, self.interleave, self.pp)
        return CriticalPath(forward=forwards, backward=backwards, transfers=transfers)

    def _times(self, forward: ArrayLike, backward: ArrayLike, transfer: float) -> Floats:
        """Durations as [forward and backward x chunk x stage, K]."""
        if self._splits_backward:
            raise EvenloadError("a schedule with its backward in two parts (I and W) cannot be timed yet")
        if not 0 <= transfer < np.inf:
            raise EvenloadError(
                f"the transfer time is {transfer}", where="$.transfer", fix="give seconds of at least 0"
            )
        pair = [
            _durations("forward", forward, self.interleave, self.pp),
            _durations("backward", backward, self.interleave, self.pp),
        ]
        if pair[0].shape != pair[1].shape:
            raise EvenloadError(f"forward times are for {len(pair[0])} plans, backward times for {len(pair[1])}")
        flat = np.stack(pair, axis=1).reshape(len(pair[0]), 2 * self.interleave * self.pp)
        return np.ascontiguousarray(flat.T)

    def _ends(self, times: Floats, transfer: float) -> Floats:
        """End of every action in level order, [N + 2, K]; the last two rows stand for "nothing before"."""
        by_level = self._levels
        plans = times.shape[1]
        ends = np.empty((len(by_level.order) + 2, plans))
        ends[-2] = 0.0
        ends[-1] = -np.inf
        arrived = np.empty((self.pp, plans))
        for low, high in by_level.bounds:
            width = high - low
            own, other = ends[low:high], arrived[:width]
            ends.take(by_level.before[low:high], axis=0, out=own, mode="clip")
            ends.take(by_level.feeds[low:high], axis=0, out=other, mode="clip")
            if transfer:
                other += transfer
            np.maximum(own, other, out=own)
            times.take(by_level.duration[low:high], axis=0, out=other, mode="clip")
            own += other
        return ends

    def _starts(self, ends: Floats, transfer: float) -> Floats:
        by_level = self._levels
        start = np.empty((ends.shape[1], len(by_level.order)))
        start[:, by_level.order] = np.maximum(ends[by_level.before], ends[by_level.feeds] + transfer).T
        return start

    @cached_property
    def _splits_backward(self) -> bool:
        return any(action.op == Op.BACKWARD_INPUT for order in self.actions for action in order)

    @cached_property
    def _last(self) -> Ints:
        """Level positions of the last action of every rank."""
        by_level = self._levels
        position = np.empty(len(by_level.order), dtype=np.int64)
        position[by_level.order] = np.arange(len(by_level.order))
        return position[np.cumsum([len(order) for order in self.actions]) - 1]

    @cached_property
    def _levels(self) -> Levels:
        return levels(self.actions, interleave=self.interleave)


@lru_cache(maxsize=32)
def _scheduled(name: str, pp: int, interleave: int, micro_batches: int) -> ActionGraph:
    return ActionGraph(schedules.actions(name, pp=pp, interleave=interleave, micro_batches=micro_batches))


def _durations(name: str, table: ArrayLike, interleave: int, pp: int) -> Floats:
    """Times as [K, chunk, stage], checked."""
    try:
        times: NDArray[Any] = np.asarray(table, dtype=np.float64)
    except (TypeError, ValueError):
        raise EvenloadError(f"{name} times are not a table of numbers", where=f"$.{name}") from None
    if times.ndim not in {2, 3} or times.shape[-2:] != (interleave, pp):
        raise EvenloadError(
            f"{name} times have the shape {list(times.shape)}",
            where=f"$.{name}",
            fix=f"give one time for each of {interleave} chunks x {pp} stages",
        )
    if not np.isfinite(times).all() or (times < 0).any():
        raise EvenloadError(f"{name} times must be finite and not negative", where=f"$.{name}")
    return times if times.ndim == 3 else times[np.newaxis]
