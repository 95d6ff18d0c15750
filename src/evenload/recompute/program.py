"""How dropped values are computed again: operators called once more on what was kept.

A program belongs to a plan, holds no tensors and is shared by all forwards that follow the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from evenload.recompute._torch_private import is_empty, version
from evenload.recompute.errors import changed_since, missing
from evenload.recompute.geometry import Geometry, view
from evenload.recompute.values import Source


class Blank(NamedTuple):
    """A tensor of which an operator reads only shape and type."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A value that recomputation starts from."""

    value: int
    source: Source
    """Where it is taken from while the layer runs."""
    captured: Geometry
    """How the tensor there lies."""
    anchor: Geometry
    """How the anchor of the value lies."""
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The state of a generator before a call that draws from it."""

    step: int
    label: str


class Cell:
    """Holds one leaf, or the state of a generator, of one forward for as long as a dropped tensor needs it."""

    __slots__ = ("_tensor", "_version")

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None
        self._version = 0

    @property
    def filled(self) -> bool:
        """Whether there is something in it."""
        return self._tensor is not None

    @property
    def readable(self) -> bool:
        """Whether its content is there: not so for tensors without data, and weights that FSDP has let go of."""
        tensor = self._tensor
        if tensor is None or is_empty(tensor):
            return False
        return not tensor.numel() or tensor.untyped_storage().nbytes() > 0

    def fill(self, tensor: torch.Tensor) -> None:
        """Keep a tensor as it is now."""
        self._tensor = tensor.detach()
        self._version = version(tensor)

    def tensor(self, label: str) -> torch.Tensor:
        """What was kept.

        Raises:
            StaleTensorError: it was changed since.
        """
        tensor = self._tensor
        if tensor is None:
            raise missing(label)
        if version(tensor) != self._version:
            raise changed_since(f"{label}, from which recomputation starts,", self._version, version(tensor))
        return tensor

    def anchor(self, leaf: Leaf) -> torch.Tensor:
        """The anchor of a leaf, on what was kept."""
        at = leaf.anchor
        return view(self.tensor(leaf.label), at.size, at.stride, at.start - leaf.captured.start, at.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One operator call of a program."""

    step: int
    label: str
    func: Any
    args: tuple[Any, ...]
    """Arguments; a tensor is a `Ref`, or a `Blank` where only its shape matters."""
    kwargs: Mapping[str, Any]
    needs: tuple[int, ...]
    """Values that it reads or writes over."""
    writes: tuple[tuple[int, int], ...]
    """(value before, value after) of every storage that it changes."""
    results: tuple[tuple[int, int, Geometry], ...]
    """(number of the returned tensor, value, how it must lie) of every new storage that it returns."""
    generator: torch.device | None
    collective: bool

    @property
    def makes(self) -> tuple[int, ...]:
        """Values that it makes."""
        return (*(value for _, value, _ in self.results), *(after for _, after in self.writes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What it takes to make one dropped value."""

    calls: tuple[Call, ...]
    """In the order in which they ran."""
    cells: tuple[int, ...]
    """Positions of the leaves and draws, among the cells of a forward."""
    leaves: tuple[tuple[int, Leaf], ...]
    """(position in `cells`, leaf)."""
    draws: tuple[tuple[int, Draw], ...]
    """(position in `cells`, draw)."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that one plan computes again. A forward has a cell for every leaf, and then for every draw."""

    leaves: tuple[Leaf, ...]
    draws: tuple[Draw, ...]
    calls: tuple[Call, ...]
    """In the order in which they ran."""
    saves: Mapping[int, int]
    """Dropped value -> tensors that autograd saved on it."""

    @cached_property
    def recipes(self) -> Mapping[int, Recipe]:
        """Dropped value -> what it takes to make it."""
        return {value: self._recipe(value) for value in self.saves}

    def _recipe(self, value: int) -> Recipe:
        wanted = {value}
        chosen: list[Call] = []
        for call in reversed(self.calls):
            if wanted.intersection(call.makes):
                chosen.append(call)
                wanted.update(call.needs)
        steps = {call.step for call in chosen}
        leaves = [(at, leaf) for at, leaf in enumerate(self.leaves) if leaf.value in wanted]
        draws = [(at, draw) for at, draw in enumerate(self.draws, len(self.leaves)) if draw.step in steps]
        cells = [at for at, _ in leaves] + [at for at, _ in draws]
        return Recipe(
            calls=tuple(reversed(chosen)),
            cells=tuple(cells),
            leaves=tuple((number, leaf) for number, (_, leaf) in enumerate(leaves)),
            draws=tuple((number, draw) for number, (_, draw) in enumerate(draws, len(leaves))),
        )
