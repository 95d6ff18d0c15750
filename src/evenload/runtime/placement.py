"""Which rank of the pipeline holds which chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from evenload.plan.layout import Layout
from evenload.plan.policy import Layers, Policy

Style = Literal["loop", "v"]
STYLES: Final = ("loop", "v")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One chunk of the pipeline."""

    index: int
    """Its position along the pipeline: `chunk * pp + stage` of the layout."""
    rank: int
    """Rank of the pipeline that holds it."""
    layers: range
    """Layers of the model that it runs."""
    first: bool
    """Whether it begins with the embedding."""
    last: bool
    """Whether it ends with the head."""


def places(layout: Layout, style: Style = "loop") -> tuple[Place, ...]:
    """Every chunk, in the order of the layers.

    In a loop the layout's entry [chunk][stage] sits on rank `stage`. In a V every second row runs back: its entry
    [chunk][stage] sits on rank `pp - 1 - stage`, so that the first and the last chunk share rank 0.

    Examples:
        >>> [place.rank for place in places(Layout(((3, 3), (3, 2))))]
        [0, 1, 0, 1]
        >>> [place.rank for place in places(Layout(((3, 3), (3, 2))), "v")]
        [0, 1, 1, 0]
    """
    pp, count = layout.pp, layout.pp * layout.interleave
    return tuple(
        Place(
            index=chunk * pp + stage,
            rank=pp - 1 - stage if style == "v" and chunk % 2 else stage,
            layers=layers,
            first=chunk * pp + stage == 0,
            last=chunk * pp + stage == count - 1,
        )
        for chunk, stage, layers in layout.chunks()
    )


def local_policy(policy: Policy, layers: range) -> Policy:
    """The part of a policy that is about some layers, which are counted from 0 in it.

    Examples:
        >>> local_policy(Policy(full=frozenset({1, 4, 5})), range(4, 8)).full
        frozenset({0, 1})
    """

    def own(chosen: Layers) -> Layers:
        return frozenset(layer - layers.start for layer in chosen if layer in layers)

    return Policy(
        full=own(policy.full),
        select={pattern: own(chosen) for pattern, chosen in policy.select.items()},
        comm={pattern: own(chosen) for pattern, chosen in policy.comm.items()},
        select_exclude={pattern: own(chosen) for pattern, chosen in policy.select_exclude.items()},
        comm_exclude={pattern: own(chosen) for pattern, chosen in policy.comm_exclude.items()},
        optimizer_comm=policy.optimizer_comm,
        mp_comm=policy.mp_comm,
        slice_activation=policy.slice_activation,
    )


def recomputes(policy: Policy) -> bool:
    """Whether a policy changes anything on any layer."""
    chosen = (policy.full, *policy.select.values(), *policy.comm.values())
    return any(chosen)
