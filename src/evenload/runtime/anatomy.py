"""The parts of a decoder, as a value: what comes before its repeated layers, what after, and what passes between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from evenload.errors import EvenloadError


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A tensor that passes between layers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def like(self, device: str = "meta") -> torch.Tensor:
        """A tensor of this shape that gradients flow through."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """The parts of one decoder."""

    container: str
    """Path of what holds the layers."""
    layers: tuple[str, ...]
    """Path of every layer, in order."""
    before: frozenset[str]
    """Names of the parameters that are used before the first layer; those that nothing uses are counted here."""
    after: frozenset[str]
    """Names of the parameters that are used after the last layer."""
    tied: tuple[tuple[str, ...], ...]
    """Names of every parameter that is used at both ends, under the same name or under several."""
    given: tuple[int, ...]
    """Shape of what the model is called with, for one micro-batch."""
    hidden: Passed
    """What one layer hands to the next, for one micro-batch."""
    result: Passed
    """What the model returns for one micro-batch: its logits."""
    argument: int | str
    """Where a layer takes it: the position or the name of the argument."""
    in_tuple: bool
    """Whether layers return a tuple that begins with it."""


def take_result(returned: Any) -> torch.Tensor:
    """The tensor that a model returns: its logits.

    Raises:
        EvenloadError: it returns something else.
    """
    logits = cast("Any", getattr(returned, "logits", None))
    if logits is None and isinstance(returned, Mapping):
        logits = cast("Mapping[str, Any]", returned).get("logits")
    if logits is None:
        several = isinstance(returned, (tuple, list)) and bool(cast("tuple[Any, ...]", returned))
        logits = cast("Any", returned)[0] if several else cast("Any", returned)
    if not isinstance(logits, torch.Tensor):
        raise EvenloadError(
            f"the model returns {type(logits).__name__}, not a tensor of logits", fix="wrap it so that it does"
        )
    return logits
