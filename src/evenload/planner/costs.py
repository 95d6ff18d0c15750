"""What layers cost, as arrays over the recompute choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT, LayerPolicy, Recompute
from evenload.profile.profile import Cost, LayerProfile, Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CHOICES: Final = (Recompute.FULL, Recompute.BOTH, Recompute.SELECT, Recompute.COMM, Recompute.NONE)
"""The choices in the order in which their layers lie in a chunk.

Settings files say "the first n layers of a chunk", with select and comm counts that include the layers of both and
full, so full comes first, then both, then select or comm, then none.
"""
FULL, BOTH, SELECT, COMM, NONE = range(5)


@dataclass(frozen=True, kw_only=True)
class KindCosts:
    """One layer of one kind on one rank, one entry per choice of `CHOICES`."""

    kind: str
    base: float
    """What the layer holds all through the step: parameters, optimizer states, buffers, gradients but for `born`."""
    born: float
    """Gradients that come to be in the first backward of a step; the same under every choice."""
    parameters: float
    """Memory of the parameters alone."""
    available: NDArray[np.bool_]
    """The profile has a cost for the choice; the arrays hold 0 where it has not."""
    forward: Floats
    backward: Floats
    """Backward time, recomputation included."""
    recompute: Floats
    """The part of `backward` that recomputation takes."""
    kept: Floats
    forward_peak: Floats
    """Highest point of the forward above its start."""
    backward_peak: Floats
    """Highest point of the backward above its start."""
    first_backward_peak: Floats
    """That of the first backward of a step."""


@dataclass(frozen=True, kw_only=True)
class EndCosts:
    """The fixed layers before the first block or after the last one, taken together."""

    base: float = 0.0
    born: float = 0.0
    parameters: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    kept: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0
    first_backward_peak: float = 0.0

    @classmethod
    def of(cls, profile: Profile, kinds: Sequence[str]) -> EndCosts:
        """Costs of a row of layers that recompute nothing."""
        layers = [profile.kind(kind) for kind in kinds]
        costs = [layer.cost(LayerPolicy()) for layer in layers]
        forward_peak = kept = 0.0
        for cost in costs:
            forward_peak = max(forward_peak, kept + cost.forward.peak)
            kept += cost.kept
        backward_peak = first_peak = level = born = 0.0
        for cost in reversed(costs):
            backward_peak = max(backward_peak, level + cost.backward.peak)
            first_peak = max(first_peak, level + born + cost.first.peak)
            level -= cost.kept
            born += cost.born
        return cls(
            base=sum(layer.static + layer.buffers for layer in layers) - born,
            born=born,
            parameters=sum(layer.parameters for layer in layers),
            forward=sum(cost.forward_time for cost in costs),
            backward=sum(cost.backward_time for cost in costs),
            kept=kept,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            first_backward_peak=first_peak,
        )


def choice_policies(
    select: Sequence[str] = DEFAULT_SELECT, comm: Sequence[str] = DEFAULT_COMM
) -> dict[Recompute, LayerPolicy]:
    """The patterns behind each choice."""
    some: dict[Recompute, LayerPolicy] = {
        Recompute.NONE: LayerPolicy(),
        Recompute.SELECT: LayerPolicy(select=tuple(select)),
        Recompute.COMM: LayerPolicy(comm=tuple(comm)),
        Recompute.BOTH: LayerPolicy(select=tuple(select), comm=tuple(comm)),
        Recompute.FULL: LayerPolicy(full=True),
    }
    return some


def kind_costs(layer: LayerProfile, policies: Mapping[Recompute, LayerPolicy]) -> KindCosts:
    """Costs of one kind under every choice that it and `policies` know."""
    costs: list[Cost | None] = [
        layer.cost(policies[choice]) if choice in layer.choices and choice in policies else None for choice in CHOICES
    ]

    def column(numbers: Sequence[float | None]) -> Floats:
        return np.array([0.0 if number is None else number for number in numbers])

    born = next((cost.born for cost in costs if cost), 0.0)
    return KindCosts(
        kind=layer.kind,
        base=layer.static + layer.buffers - born,
        born=born,
        parameters=layer.parameters,
        available=np.array([cost is not None for cost in costs]),
        forward=column([cost and cost.forward_time for cost in costs]),
        backward=column([cost and cost.backward_time for cost in costs]),
        recompute=column([cost and cost.recompute_time for cost in costs]),
        kept=column([cost and cost.kept for cost in costs]),
        forward_peak=column([cost and cost.forward.peak for cost in costs]),
        backward_peak=column([cost and cost.backward.peak for cost in costs]),
        first_backward_peak=column([cost and cost.first.peak for cost in costs]),
    )
