"""How long a step was predicted to take, and how long steps take."""

from __future__ import annotations

from importlib.util import find_spec
from statistics import median, quantiles
from typing import Any, Final

import msgspec
import torch

from evenload.errors import EvenloadError
from evenload.plan.plan import Plan
from evenload.profile.measured import Code, Measured
from evenload.runtime.settings import RunSettings
from evenload.simulate.timeline import simulate
from evenload.units import plural

FIRST: Final = 4
"""Steps that do not count: memory is mapped, operators are recorded, and the recorder watches the first three."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a step. Seconds."""

    predicted: float | None = None
    """By the simulator, with measured times of layers; None: there is no measured profile."""
    measured: float | None = None
    """Median of the steps after the first few; None: there were none."""
    low: float | None = None
    """A quarter of the steps took less."""
    high: float | None = None
    """A quarter took more."""
    steps: int = 0
    """How many were measured."""

    @property
    def error(self) -> float | None:
        """Measured above predicted, as a share of predicted."""
        return None if not self.predicted or self.measured is None else self.measured / self.predicted - 1

    def __str__(self) -> str:
        predicted = "no prediction" if self.predicted is None else f"predicted {_milliseconds(self.predicted)}"
        if self.measured is None or self.low is None or self.high is None:
            return f"step time: {predicted}, too few steps to measure"
        spread = f"half of them {_milliseconds(self.low)} to {_milliseconds(self.high)}"
        found = f"measured {_milliseconds(self.measured)} (median of {plural(self.steps, 'step')}, {spread})"
        error = "" if self.error is None else f", {self.error:+.1%}"
        return f"step time: {predicted}, {found}{error}"


class Pace:
    """Collects the times of steps."""

    def __init__(self, predicted: float | None) -> None:
        self._predicted = predicted
        self._seen = 0
        self._taken: list[float] = []

    def step(self, seconds: float) -> None:
        """A step has ended."""
        self._seen += 1
        if self._seen > FIRST:
            self._taken.append(seconds)

    @property
    def found(self) -> StepTime:
        """What is known so far."""
        taken = self._taken
        if not taken:
            return StepTime(predicted=self._predicted)
        low, _, high = quantiles(taken, n=4, method="inclusive") if len(taken) > 1 else taken * 3
        return StepTime(predicted=self._predicted, measured=median(taken), low=low, high=high, steps=len(taken))


def predicted_step(measured: Measured, plan: Plan, settings: RunSettings, *, own: bool) -> float:
    """Seconds of a step under a plan, by the measured times of its layers.

    Args:
        measured: the profile.
        plan: the plan.
        settings: of the run.
        own: the model is a function of the user's.

    Raises:
        EvenloadError: the profile was measured under other conditions than the run's.
    """
    now = measured.conditions
    code: Code = "own" if own else code_of(settings.implementation)
    for name, run, then, fix in (
        ("the device", "cuda" if torch.cuda.is_available() else "cpu", now.device, "measure where the run is"),
        ("the number of threads", torch.get_num_threads(), now.threads, "measure with the run's OMP_NUM_THREADS"),
        ("the model's code", code, now.code, "measure with the run's --implementation"),
        ("autocast", settings.autocast, now.autocast, "measure with the run's --autocast"),
        ("the form of AdamW", settings.adamw, now.adamw, "measure with the run's --adamw"),
    ):
        if run != then:
            raise EvenloadError(
                f"{name} is {run or 'off'}, but the profile was measured with {then or 'none'}", fix=fix
            )
    timeline = simulate(measured.profile(plan.setup, plan.policy), plan)
    return settings.accumulation * timeline.step_time + timeline.update


def code_of(implementation: str) -> Code:
    """Whose code a configuration's model is."""
    missing: Any = find_spec("transformers") is None
    return "reference" if implementation == "reference" or (implementation == "auto" and missing) else "transformers"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
