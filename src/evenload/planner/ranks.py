"""What a rank can recompute under the limit, once its layers are known: the quickest combinations that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from evenload.planner.chunks import ChunkOptions, chunk_options
from evenload.planner.costs import EndCosts, Floats, Ints
from evenload.planner.pareto import lowest_by, nondominated
from evenload.planner.problem import Problem
from evenload.simulate.inflight import InFlight

WIDEST: Final = 20_000
"""Combinations of the chunks so far, times chunks squared, that are looked at together; beyond it the most promising
are kept."""
LONGEST: Final = 64
"""Combinations listed for one rank."""

Content = bytes
"""The kinds of a chunk's blocks in order: chunks with equal contents cost the same."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankOptions:
    """Combinations of recompute choices of one rank that fit, quickest first; arrays over the combinations."""

    times: Floats
    """[combination, forward and backward, chunk]."""
    recompute: Floats
    """[combination]."""
    peak: Floats
    """[combination]: highest memory of the rank, `outside` not included."""
    counts: Ints
    """[combination, chunk, choice]: layers under each choice."""
    complete: bool = True
    """No combination that could be of use was left out."""

    def __len__(self) -> int:
        return len(self.peak)


class Ranks:
    """The options of chunks and ranks, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._chunks: dict[tuple[Content, bool, bool], ChunkOptions] = {}
        self._ranks: dict[tuple[int, tuple[Content, ...]], RankOptions] = {}
        self._lean: dict[tuple[int, tuple[Content, ...]], RankOptions] = {}
        self._kinds = problem.kinds.astype(np.uint8 if len(problem.costs) < 256 else np.uint16)
        self._width = self._kinds.itemsize
        self._bytes = self._kinds.tobytes()

    def content(self, start: int, end: int) -> Content:
        """The kinds of blocks `start` to `end - 1`."""
        return self._bytes[start * self._width : end * self._width]

    def contents(self, counts: Sequence[int]) -> tuple[Content, ...]:
        """Content of every chunk in layer order."""
        found: list[Content] = []
        start = 0
        for count in counts:
            found.append(self.content(start, start + count))
            start += count
        return tuple(found)

    def of_rank(self, stage: int, contents: Sequence[Content]) -> tuple[Content, ...]:
        """The contents that one rank holds."""
        return tuple(contents[stage :: self.problem.pp])

    def distinct(self, chunk: int, layers: int) -> tuple[Content, ...]:
        """The different contents that a chunk with so many layers can have."""
        last = len(self._kinds) - layers
        first = chunk == 0
        starts = [0] if first else [last] if chunk == self.problem.chunks - 1 else range(last + 1)
        return tuple(dict.fromkeys(self.content(start, start + layers) for start in starts))

    def kinds_of(self, content: Content) -> Ints:
        """[kind]: layers of each kind."""
        return np.bincount(np.frombuffer(content, dtype=self._kinds.dtype), minlength=len(self.problem.costs))

    def least_work(self, chunk: int, content: Content) -> float:
        """Forward and backward time of a chunk whose choices are the quickest, whether they fit or not."""
        options = self.chunk(chunk, content)
        return float((options.forward + options.backward).min())

    def chunk(self, chunk: int, content: Content) -> ChunkOptions:
        """Options of a chunk, numbered in layer order."""
        key = (content, chunk == 0, chunk == self.problem.chunks - 1)
        if key not in self._chunks:
            options = self._every(chunk, content)
            self._chunks[key] = options if self.problem.interleave == 1 else options.best()
        return self._chunks[key]

    def options(self, stage: int, contents: tuple[Content, ...]) -> RankOptions:
        """Combinations of a rank that fit.

        With one chunk it is the single quickest one: step times never fall when a chunk takes longer. With several
        chunks it is those that no other beats in every chunk; of very many the quickest in total.
        """
        key = (stage, contents)
        if key not in self._ranks:
            self._ranks[key] = self._combine(stage, self._of(stage, contents))
        return self._ranks[key]

    def pinned(self, stage: int, contents: tuple[Content, ...], counts: Ints) -> RankOptions | None:
        """One given combination [chunk, choice] as options, or None where it does not fit or is not expressible."""
        chosen: list[ChunkOptions] = []
        for options, row in zip(self._of(stage, contents), counts, strict=True):
            at = np.flatnonzero((options.counts == row).all(axis=1))
            if not len(at):
                return None
            chosen.append(options.take(at[:1]))
        found = self._combine(stage, chosen)
        return found if len(found) else None

    def forced(self, stage: int, contents: tuple[Content, ...], choice: int) -> RankOptions:
        """One choice on all layers of a rank, whether it fits or not; where a kind lacks it, the leanest it has."""
        every = [self._every(row * self.problem.pp + stage, content) for row, content in enumerate(contents)]
        chosen = [
            options.take(np.lexsort((options.backward, options.kept, -options.counts[:, choice]))[:1])
            for options in every
        ]
        return self._combine(stage, chosen, limited=False)

    def leanest(self, stage: int, contents: tuple[Content, ...]) -> RankOptions:
        """The combination with the lowest peak that a step by step descent finds, whether it fits or not."""
        key = (stage, contents)
        if key not in self._lean:
            options = self._of(stage, contents)
            lean = [one.take(np.lexsort((one.backward, one.backward_peak, one.kept))[:1]) for one in options]
            self._lean[key] = self._combine(stage, lean, limited=False)
        return self._lean[key]

    def base(self, stage: int, options: Sequence[ChunkOptions]) -> tuple[float, float]:
        """(held all through the step, working memory of the optimizer step with the gradients that it finds)."""
        problem = self.problem
        held = problem.profile.constant + sum(option.base for option in options)
        held += problem.buffers(stage, sum(option.layers for option in options))
        born = sum(option.born for option in options)
        return held, born + problem.optimizer_transient(sum(option.parameters for option in options))

    def _every(self, chunk: int, content: Content) -> ChunkOptions:
        kinds: list[int] = np.frombuffer(content, dtype=self._kinds.dtype).tolist()
        return chunk_options(
            [self.problem.costs[kind] for kind in kinds],
            self.problem.ahead(chunk),
            self.problem.after if chunk == self.problem.chunks - 1 else EndCosts(),
        )

    def _of(self, stage: int, contents: tuple[Content, ...]) -> list[ChunkOptions]:
        pp = self.problem.pp
        return [self.chunk(row * pp + stage, content) for row, content in enumerate(contents)]

    def _combine(self, stage: int, options: Sequence[ChunkOptions], *, limited: bool = True) -> RankOptions:
        moments = self.problem.moments[stage]
        held, optimizer = self.base(stage, options)
        room = self.problem.limit - self.problem.profile.outside - held if limited else np.inf
        loads = [_load(option, moments, chunk) for chunk, option in enumerate(options)]
        complete = True
        if optimizer > room:
            rows, load = np.empty((0, len(options)), dtype=np.int64), np.empty((0, moments.held.shape[0]))
        elif len(options) == 1:
            rows, load = self._quickest(options[0], loads[0], room)
        else:
            rows, load, complete = self._merge(options, loads, room)
        return RankOptions(
            times=np.stack(
                [
                    _pick([option.forward for option in options], rows),
                    _pick([option.backward for option in options], rows),
                ],
                axis=1,
            ),
            recompute=_pick([option.recompute for option in options], rows).sum(axis=1),
            peak=held + np.maximum(load.max(axis=1, initial=-np.inf), optimizer),
            counts=np.stack([option.counts[rows[:, chunk]] for chunk, option in enumerate(options)], axis=1),
            complete=complete,
        )

    @staticmethod
    def _quickest(options: ChunkOptions, load: Floats, room: float) -> tuple[Ints, Floats]:
        top = load.max(axis=1)
        work = options.forward + options.backward
        best = lowest_by((work, options.recompute, top), top <= room)
        rows = np.array([] if best is None else [best], dtype=np.int64)
        return rows[:, None], load[rows]

    @staticmethod
    def _merge(options: Sequence[ChunkOptions], loads: Sequence[Floats], room: float) -> tuple[Ints, Floats, bool]:
        """Chunk after chunk, every combination that can still fit; then those that no other beats in every chunk."""
        lowest = np.array([load.min(axis=0) for load in loads])
        rest = np.vstack([np.cumsum(lowest[::-1], axis=0)[::-1], np.zeros(lowest.shape[1])])
        rows = np.zeros((1, 0), dtype=np.int64)
        load = np.zeros((1, lowest.shape[1]))
        work = np.zeros(1)
        widest, complete = WIDEST // len(options) ** 2, True
        for chunk, option in enumerate(options):
            total = load[:, None, :] + loads[chunk][None]
            before, of_chunk = np.nonzero((total + rest[chunk + 1] <= room).all(axis=2))
            rows = np.concatenate([rows[before], of_chunk[:, None]], axis=1)
            load = total[before, of_chunk]
            work = work[before] + (option.forward + option.backward)[of_chunk]
            if len(rows) > widest:
                keep = _promising(work, (load + rest[chunk + 1]).max(axis=1), widest)
                rows, load, work, complete = rows[keep], load[keep], work[keep], False
        best = np.argsort(work, kind="stable")[: 16 * LONGEST]
        times = np.concatenate(
            [_pick([getattr(option, name) for option in options], rows[best]) for name in ("forward", "backward")],
            axis=1,
        )
        complete &= len(best) == len(rows)
        if len(best):
            best = best[nondominated(times)]
        complete &= len(best) <= LONGEST
        return rows[best[:LONGEST]], load[best[:LONGEST]], complete


def _load(options: ChunkOptions, moments: InFlight, chunk: int) -> Floats:
    """[option, moment]: what a chunk adds to its rank at every moment."""
    backward = np.where(moments.first, options.first_backward_peak[:, None], options.backward_peak[:, None])
    running = np.where(moments.forward, options.forward_peak[:, None], backward)
    held = np.outer(options.kept, moments.held[:, chunk]) + options.born * moments.born[:, chunk]
    return held + np.where(moments.chunk == chunk, running, 0.0)


def _pick(columns: Sequence[Floats], rows: Ints) -> Floats:
    """[combination, chunk]: a number of every chosen option."""
    return np.stack([column[rows[:, chunk]] for chunk, column in enumerate(columns)], axis=1)


def _promising(work: Floats, load: Floats, widest: int) -> Ints:
    """Rows to go on with: the best trade-offs of time and memory, then the quickest."""
    trade = nondominated(np.stack([work, load], axis=1))
    quick = np.argsort(work, kind="stable")[: widest // 8]
    return np.unique(np.concatenate([trade, quick]))
