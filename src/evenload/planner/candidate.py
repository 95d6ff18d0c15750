"""A candidate: layers of every chunk and the recompute combination of every rank, with their durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evenload.planner.costs import CHOICES, Floats, Ints
from evenload.planner.problem import Counts
from evenload.planner.ranks import Content, RankOptions, Ranks

Key = tuple[Counts, tuple[int, ...]]
"""Layers of every chunk, and the combination of every rank."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Candidate:
    """Layers and choices that fit on every rank."""

    counts: Counts
    contents: tuple[Content, ...]
    ranks: tuple[RankOptions, ...]
    """[stage]."""
    picks: tuple[int, ...]
    """[stage]: which combination of the rank's options."""
    times: Floats
    """[forward and backward, chunk, stage]."""

    @property
    def key(self) -> Key:
        """Equal for candidates made of the same options."""
        return self.counts, self.picks

    @property
    def forward(self) -> Floats:
        """[chunk, stage]: forward times."""
        return self.times[0]

    @property
    def backward(self) -> Floats:
        """[chunk, stage]: backward times."""
        return self.times[1]

    @property
    def recompute(self) -> float:
        """Recompute time of one micro-batch over all ranks."""
        return float(sum(rank.recompute[pick] for rank, pick in self._picked()))

    @property
    def peaks(self) -> tuple[float, ...]:
        """Highest memory of every rank, `outside` not included."""
        return tuple(float(rank.peak[pick]) for rank, pick in self._picked())

    @property
    def choices(self) -> Ints:
        """[chunk in layer order, choice]: layers under each choice."""
        of_ranks = np.array([rank.counts[pick] for rank, pick in self._picked()])
        return of_ranks.transpose(1, 0, 2).reshape(-1, len(CHOICES))

    def with_pick(self, stage: int, pick: int) -> Candidate:
        """The same layers with another combination on one rank."""
        return self.changed({stage: (self.ranks[stage], pick)})

    def changed(
        self,
        new: Mapping[int, tuple[RankOptions, int]],
        counts: Counts | None = None,
        contents: Sequence[Content] | None = None,
    ) -> Candidate:
        """Other options on some ranks; other layers where `counts` and `contents` say so."""
        ranks, picks, times = list(self.ranks), list(self.picks), self.times.copy()
        for stage, (options, pick) in new.items():
            ranks[stage], picks[stage] = options, pick
            times[:, :, stage] = options.times[pick]
        return Candidate(
            counts=self.counts if counts is None else counts,
            contents=self.contents if contents is None else tuple(contents),
            ranks=tuple(ranks),
            picks=tuple(picks),
            times=times,
        )

    def _picked(self) -> zip[tuple[RankOptions, int]]:
        return zip(self.ranks, self.picks, strict=True)


def candidate(ranks: Ranks, counts: Counts, choices: Ints | None = None) -> Candidate | None:
    """The candidate with these layers, and on every rank the quickest combination or a given one.

    Args:
        ranks: the options.
        counts: layers of every chunk, in layer order.
        choices: [chunk in layer order, choice] layers under each choice, taken where they fit and are expressible.

    Returns:
        None where a rank cannot fit.
    """
    contents, pp = ranks.contents(counts), ranks.problem.pp
    found: list[RankOptions] = []
    for stage in range(pp):
        mine = ranks.of_rank(stage, contents)
        given = None if choices is None else ranks.pinned(stage, mine, choices[stage::pp])
        options = given or ranks.options(stage, mine)
        if not len(options):
            return None
        found.append(options)
    return of_options(counts, contents, found)


def of_options(counts: Counts, contents: tuple[Content, ...], ranks: Sequence[RankOptions]) -> Candidate:
    """The candidate that takes the first combination of every rank."""
    return Candidate(
        counts=counts,
        contents=contents,
        ranks=tuple(ranks),
        picks=(0,) * len(ranks),
        times=np.stack([options.times[0] for options in ranks], axis=2),
    )
