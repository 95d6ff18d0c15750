"""From what is known about every allocation to its category: a rule about lives, not a guess about names."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.ledger.words import Category, Phase, Role


def derive(
    *,
    roles: NDArray[Any],
    phase: NDArray[Any],
    allocated: NDArray[Any],
    freed: NDArray[Any],
    backward_begins: NDArray[Any],
) -> NDArray[np.uint8]:
    """Category codes of allocations.

    Who holds a storage comes first (parameter, optimizer, gradient), then what it was made for (communication, input).
    For the rest its life decides: what forward or recompute allocated and the next backward finds alive is an
    activation kept for it. That also finds tensors that a custom function hides in attributes of its context, which
    hooks on saved tensors do not see.

    Args:
        roles: `Role` bits.
        phase: `Phase` codes.
        allocated: index of the allocation in the order of events.
        freed: index of the free, above every other index while alive.
        backward_begins: sorted indexes at which a backward, or what follows a recomputation in it, begins.
    """
    category = np.full(roles.shape, Category.TEMPORARY.code, dtype=np.uint8)
    forward = (phase == Phase.FORWARD.code) | (phase == Phase.RECOMPUTE.code) | _has(roles, Role.GRAPH)
    category[_has(roles, Role.COLLECTIVE)] = Category.COMMUNICATION.code
    category[forward & _meets(allocated, freed, backward_begins)] = Category.ACTIVATION.code
    category[_has(roles, Role.INPUT) & (phase == Phase.OTHER.code)] = Category.INPUT.code
    category[_has(roles, Role.BUFFER)] = Category.COMMUNICATION.code
    category[_has(roles, Role.GRADIENT)] = Category.GRADIENT.code
    category[_has(roles, Role.OPTIMIZER)] = Category.OPTIMIZER.code
    category[_has(roles, Role.PARAMETER)] = Category.PARAMETER.code
    return category


def _has(roles: NDArray[Any], role: Role) -> NDArray[np.bool_]:
    return (roles & role.value) != 0


def _meets(allocated: NDArray[Any], freed: NDArray[Any], begins: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether an allocation is alive when the first backward after it begins."""
    if not len(begins):
        return np.zeros(allocated.shape, dtype=np.bool_)
    following = np.searchsorted(begins, allocated, side="right")
    exists = following < len(begins)
    return exists & (freed >= begins[np.minimum(following, len(begins) - 1)])
