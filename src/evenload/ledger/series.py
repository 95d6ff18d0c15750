"""Memory sampled over time: does it grow, does only its peak drift, and when is the device full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from statistics import median
from typing import Final

from evenload.errors import EvenloadError


class Trend(StrEnum):
    """What samples do."""

    FLAT = "flat"
    """Neither the baseline nor the peak rises."""
    GROWTH = "growth"
    """The baseline rises and does not settle: something is not released."""
    IMBALANCE = "imbalance"
    """The peak drifts, and the baseline between steps stays where it was: the work differs from step to step."""
    FRAGMENTATION = "fragmentation"
    """What the allocator reserves rises, and what tensors hold does not."""
    UNDECIDED = "undecided"
    """Too few samples, or only a peak that drifts without a baseline to compare it with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Samples in bytes, in order."""

    baseline: tuple[float, ...] = ()
    """What is held between steps, when all temporaries are gone."""
    peak: tuple[float, ...] = ()
    """Highest level since the sample before."""
    reserved: tuple[float, ...] = ()
    """What the allocator holds, whether tensors use it or not."""
    at: tuple[int, ...] = ()
    """Number of the step of every sample; empty: one sample a step."""
    event: str | None = None
    """What the samples follow, where that is not every step: `after each checkpoint save`."""
    capacity: float | None = None
    """Memory of the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a series does, and what that leads to."""

    trend: Trend
    increments: tuple[float, ...]
    """Change of the baseline (of the peak, where there is no baseline) from sample to sample."""
    per_step: float
    """Typical change a step (an event), in bytes; 0 where it does not grow."""
    full_at: int | None
    """Step (sample) at which the device is full if it goes on like this; None: not at all, or not known."""
    next_overflows: bool = False
    """Whether the device is full before the next sample."""


NOTICEABLE: Final = 0.01
"""Share of a level below which a change is noise."""


def judge(series: Series) -> Judgement:
    """Whether memory grows.

    A baseline grows when the level that it never falls below again keeps rising, by more than noise, and does not
    settle: the first sample, which may be older than the warm-up, and swings are no growth. A peak that drifts above a
    flat baseline is work that differs, and a reservation that does is fragmentation: neither is memory that is kept.

    Raises:
        EvenloadError: a sample is no number of bytes, or there are none.
    """
    _check(series)
    samples = list(series.baseline or series.peak or series.reserved)
    increments = tuple(later - earlier for earlier, later in pairwise(samples))
    grows = _rises(samples)
    drifts = _rises(series.peak)
    spreads = _rises(series.reserved)
    if series.baseline:
        trend = Trend.GROWTH if grows else Trend.IMBALANCE if drifts else Trend.FLAT
        if trend is Trend.FLAT and spreads:
            trend = Trend.FRAGMENTATION
    else:
        trend = Trend.UNDECIDED if drifts or spreads else Trend.FLAT
    if len(samples) < 2:
        trend = Trend.UNDECIDED
    if trend is not Trend.GROWTH:
        return Judgement(trend=trend, increments=increments, per_step=0.0, full_at=None)
    steps = list(series.at or range(len(samples)))
    rates = [change / (after - before) for change, (before, after) in zip(increments, pairwise(steps), strict=True)]
    per_step = median(rates)
    if per_step <= 0:  # it grows at some of the samples only
        per_step = (samples[-1] - samples[0]) / (steps[-1] - steps[0])
    full_at, next_overflows = None, False
    if series.capacity is not None and per_step > 0:
        room = series.capacity - max((*samples[-1:], *series.peak[-1:], *series.reserved[-1:]))
        full_at = steps[-1] + max(1, math.ceil(room / per_step))
        next_overflows = room < median(increments)
    return Judgement(
        trend=trend, increments=increments, per_step=per_step, full_at=full_at, next_overflows=next_overflows
    )


def _check(series: Series) -> None:
    for name, samples in (("baseline", series.baseline), ("peak", series.peak), ("reserved", series.reserved)):
        for number, sample in enumerate(samples):
            if not 0 <= sample < math.inf:
                raise EvenloadError(f"sample {number} is {sample}, which is no amount of memory", where=f"$.{name}")
    if not series.baseline and not series.peak and not series.reserved:
        raise EvenloadError("there are no samples", where="$.baseline", fix="give memory after every step")
    if series.at and (
        len(series.at) != len(series.baseline or series.peak or series.reserved) or not _rising(series.at)
    ):
        raise EvenloadError("the steps of the samples do not rise one by one with them", where="$.at")


def _rising(numbers: Sequence[float]) -> bool:
    return all(earlier < later for earlier, later in pairwise(numbers))


_SETTLED: Final = 0.2
"""Share of the earlier rise below which the later one is taken for the end of a warm-up."""


def _rises(samples: Sequence[float]) -> bool:
    """Whether samples keep rising, by more than noise and than they swing."""
    if len(samples) < 2 or samples[-1] - samples[0] <= NOTICEABLE * max(samples[0], 1.0):
        return False
    if len(samples) == 2:
        return True
    kept = list(accumulate(reversed(samples), min))[::-1]  # the level that is never left again
    swing = median(abs(later - earlier) for earlier, later in pairwise(samples))
    if kept[-1] - kept[0] <= swing:
        return False
    after = kept if len(kept) == 3 else kept[1:]
    return _keeps_rising(after) or (len(after) >= 6 and _keeps_rising(after[len(after) // 2 :]))


def _keeps_rising(levels: Sequence[float]) -> bool:
    """Whether the later half rises as the earlier one does."""
    if levels[-1] - levels[0] <= NOTICEABLE * max(levels[0], 1.0):
        return False
    middle = levels[len(levels) // 2]
    earlier, later = middle - levels[0], levels[-1] - middle
    return earlier > 0 and later > _SETTLED * earlier
