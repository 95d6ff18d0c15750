"""Python's garbage collector, run every so many steps, with a report of what it freed.

Cycles of objects that hold tensors are freed only when the collector runs, and it counts objects, not bytes: it may
wait long while a few large tensors fill the device. Collecting by hand every few hundred steps bounds that. What it
freed is told, so that it can be seen whether it helps at all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Self

from evenload.errors import EvenloadError
from evenload.record.living import living_storages
from evenload.units import human_bytes, human_seconds

PASSES: Final = 20
"""Most passes of one run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What one run of the collector did."""

    step: int
    """Number of the step after which it ran, from 1 on."""
    objects: int
    """Python objects that it found unreachable."""
    nbytes: int
    """Bytes of storages of tensors that it freed, on all devices."""
    seconds: float
    passes: int
    """How often it ran until it found nothing more."""

    def __str__(self) -> str:
        return (
            f"step {self.step}: the garbage collector freed {human_bytes(self.nbytes)} of tensors "
            f"({self.objects} objects) in {human_seconds(self.seconds)}"
        )


class PeriodicGC:
    """Collects every so many steps.

    Examples:
        >>> collector = PeriodicGC(every=200)
        >>> for _ in range(400):
        ...     _ = collector.step()
        >>> len(collector.runs)
        2
    """

    def __init__(
        self, *, every: int, automatic: bool = True, report: Callable[[Collected], object] | None = None
    ) -> None:
        """Make the callback.

        Args:
            every: steps between two runs.
            automatic: leave Python's own runs on; False switches them off while the callback is used as a context
                manager, so that no run falls into a step.
            report: called with what every run did, such as `print`.

        Raises:
            EvenloadError: `every` is no positive number.
        """
        if type(every) is not int or every < 1:
            raise EvenloadError(f"every is {every!r}, not a number of steps", fix="give an integer from 1 on")
        self.every = every
        self.runs: list[Collected] = []
        """What every run did, in order."""
        self._automatic = automatic
        self._report = report
        self._steps = 0
        self._was_on = True

    def __enter__(self) -> Self:
        self._was_on = gc.isenabled()
        if not self._automatic:
            gc.disable()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._was_on and not self._automatic:
            gc.enable()

    def step(self) -> Collected | None:
        """Say that a step has ended; returns what the collector did, if it ran."""
        self._steps += 1
        return self.collect() if self._steps % self.every == 0 else None

    __call__ = step

    def collect(self) -> Collected:
        """Run the collector now."""
        before = living_storages()
        begin, objects, passes = perf_counter(), 0, 0
        while passes < PASSES and (found := gc.collect()):
            # Cycles along one backward graph are freed one by one from its end: the collector cannot look into it.
            objects, passes = objects + found, passes + 1
        seconds = perf_counter() - begin
        after = living_storages()
        freed = sum(nbytes for key, nbytes in before.items() if key not in after)
        run = Collected(step=self._steps, objects=objects, nbytes=freed, seconds=seconds, passes=passes)
        self.runs.append(run)
        if self._report is not None:
            self._report(run)
        return run

    @property
    def nbytes(self) -> int:
        """Bytes that all runs freed."""
        return sum(run.nbytes for run in self.runs)

    @property
    def helps(self) -> bool | None:
        """Whether any run freed memory of tensors; None: it has not run yet."""
        return any(run.nbytes for run in self.runs) if self.runs else None
