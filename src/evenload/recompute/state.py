"""What the engine knows of one layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from evenload.plan.policy import LayerPolicy
from evenload.recompute.full import Slicing
from evenload.recompute.layer_plan import LayerPlan
from evenload.recompute.likeness import Key, Watch, nature

Served = Literal["hooks", "mode", "recorded", "compared", "kept", "checkpoint"]
"""How a forward was served: by a plan, by recording it, by the plan of a layer like this one after comparing every
operator with it, by keeping everything where it left its plan, or as a whole."""
WAYS: Final[tuple[Served, ...]] = ("recorded", "compared", "hooks", "mode", "kept", "checkpoint")
"""In the order in which they come up."""

MOST_PLANS: Final = 16
"""Plans of one layer that are remembered, one for each shape, type and mode of its arguments."""
MOST_MISMATCHES: Final = 2
"""A layer that leaves its plan so often goes its own way every time, and is recorded every time."""


@dataclass(kw_only=True, eq=False)
class LayerState:
    """One layer that is recomputed."""

    layer: torch.nn.Module
    name: str
    """Its path in the model."""
    policy: LayerPolicy
    number: int = 0
    """Its place in the model."""
    kin: dict[Key, LayerPlan] = field(default_factory=dict[Key, LayerPlan])
    """The plans of all layers of the model, by what layers have in common."""
    whole: bool = False
    """Full recompute by `torch.utils.checkpoint`, not by the engine."""
    mp_comm: bool = True
    """Full recompute runs collectives again."""
    slicing: Slicing | None = None
    """Full recompute keeps a part of the input."""
    rehearse: bool = False
    """Record on fake tensors before the layer first runs, so that no forward holds intermediate results."""
    unproved: set[Key] = field(default_factory=set[Key])
    """Keys whose plans come from fake tensors and were never tried."""
    plans: dict[Key, LayerPlan] = field(default_factory=dict[Key, LayerPlan])
    watch: Watch | None = None
    served: Counter[Served] = field(default_factory=Counter[Served])
    """Forwards by how they were served."""
    last: LayerPlan | None = None
    """The plan of the last forward that was recorded or followed."""
    mismatches: Counter[Key] = field(default_factory=Counter[Key])
    """Forwards that left their plan."""
    why_kept: str | None = None
    """Why the last of these did."""
    given: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Arguments that are kept only to start from: name -> (storage, bytes), of the last forward."""
    output: int | None = None
    """Storage of what the layer returned, where the layer itself keeps it, in the last forward."""

    def remember(self, key: Key, plan: LayerPlan) -> None:
        """Follow a plan in forwards with this key, unless they left their plans too often."""
        if self.mismatches[key] >= MOST_MISMATCHES:
            return
        _store(self.plans, key, plan)

    def related(self, key: Key, fake: bool) -> Key:
        """What a forward with a key has in common with those of other layers, and of this one when it was changed."""
        return nature(self.layer, self.number), self.policy, self.mp_comm, fake, key[:2]

    def left(self, key: Key, why: str) -> None:
        """A forward left its plan: the next one is recorded."""
        self.served["kept"] += 1
        self.mismatches[key] += 1
        self.why_kept = why
        self.plans.pop(key, None)

    def share(self, key: Key, plan: LayerPlan, *, fake: bool) -> None:
        """Offer a plan to layers like this one.

        Args:
            key: of the forward that it was made from.
            plan: the plan.
            fake: it was made from fake tensors, where some operators come as others.
        """
        if not self.mismatches[key]:
            _store(self.kin, self.related(key, fake), plan)

    def offered(self, key: Key, *, fake: bool) -> LayerPlan | None:
        """The plan of a layer like this one, unless this one goes its own way."""
        return self.kin.get(self.related(key, fake)) if self.kin and not self.mismatches[key] else None

    def of_copy(self, layer: torch.nn.Module) -> LayerState:
        """The same for a copy of the layer, which has not run yet."""
        return LayerState(
            layer=layer,
            name=self.name,
            number=self.number,
            kin=self.kin,
            policy=self.policy,
            whole=self.whole,
            mp_comm=self.mp_comm,
            slicing=self.slicing,
            rehearse=self.rehearse,
        )

    def notices(self) -> list[str]:
        """What the user should know."""
        if self.slicing is not None and self.slicing.notice:
            return [f"recompute_slice_activation: {self.slicing.notice}"]
        return []


def _store(plans: dict[Key, LayerPlan], key: Key, plan: LayerPlan) -> None:
    """Remember a plan, and forget the oldest of too many."""
    plans.pop(key, None)
    while len(plans) >= MOST_PLANS:
        del plans[next(iter(plans))]
    plans[key] = plan
