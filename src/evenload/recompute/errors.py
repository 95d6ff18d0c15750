"""Errors that can come up while a model trains; each is a `RuntimeError` too, as torch's own are."""

from __future__ import annotations

import torch

from evenload.errors import EvenloadError
from evenload.recompute.geometry import Geometry


class RecomputeError(EvenloadError, RuntimeError):
    """Recomputation cannot work where, or as, it is used."""


class StaleTensorError(RecomputeError):
    """Something that backward needs is not what it was in forward."""


def changed_since(what: str, expected: int, found: int) -> StaleTensorError:
    """A tensor was changed in place between forward and backward."""
    return StaleTensorError(
        f"{what} was changed in place after it was saved for backward: it is at version {found}, expected {expected}",
        fix="do not change it in place before backward has run (`x = x + 1` instead of `x += 1`)",
    )


def changed_result(label: str, expected: Geometry, found: torch.Tensor) -> StaleTensorError:
    """An operator gives something else than in forward."""
    return StaleTensorError(
        f"{label} gives a tensor of shape {tuple(found.shape)}, strides {found.stride()} and type {found.dtype} when "
        f"it runs again; in forward it was {expected.size}, {expected.stride} and {expected.dtype}",
        fix="leave this operator out of the recomputation",
    )


def missing_result(label: str) -> StaleTensorError:
    """An operator gives less than in forward: some leave out what only backward needs, unless autograd is on."""
    return StaleTensorError(
        f"{label} gives fewer tensors when it runs again than in forward",
        fix="leave this operator out of the recomputation",
    )


def missing(label: str) -> StaleTensorError:
    """Backward asks for something that was never kept."""
    return StaleTensorError(f"{label}, from which recomputation starts, was not kept: the layer has not returned yet")
