"""The `Plan` value: a setup, who holds which layer, what is recomputed, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.policy import LayerPolicy, Policy
from evenload.setup import Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that a run needs to know about its pipeline. Frozen; written and read by `evenload.dialects`."""

    setup: Setup
    layout: Layout
    policy: Policy
    model: str | None = None
    """Name or path of the model the plan was made for; None for a plan over a given table."""
    profile: str | None = None
    """Path of the measured profile that it was made with; None: with none."""

    def __post_init__(self) -> None:
        if (self.layout.pp, self.layout.interleave) != (self.setup.pp, self.setup.interleave):
            raise EvenloadError(
                f"the layout has {self.layout.interleave} chunks x {self.layout.pp} stages, "
                f"the setup {self.setup.interleave} x {self.setup.pp}",
                where="$.layout",
            )

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return self.setup.schedule

    def for_layer(self, layer: int) -> LayerPolicy:
        """What is recomputed on one layer."""
        return self.policy.for_layer(layer)
