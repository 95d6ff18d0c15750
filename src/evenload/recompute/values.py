"""What a recording is made of: values, the steps that make them, and the tensors that autograd saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from evenload.recompute.errors import missing
from evenload.recompute.geometry import Geometry, Ref
from evenload.recompute.wrappers import Wrapping


class Source(NamedTuple):
    """Where the tensor of a value can be taken from while the layer runs."""

    kind: str
    """`argument`, `parameter`, `pack`, `module` or `step`."""
    at: tuple[Any, ...]
    """Which one: (position,), (dotted name,), (number of the save,), (path, call, "in" or "out", position), (number of
    the step, result)."""
    late: bool = False
    """It comes after the layer's code has looked at data, so that it may come otherwise next time."""


@dataclass(slots=True)
class Sighting:
    """A tensor on a value, at a place where it can be taken when the layer runs again."""

    source: Source
    at: Geometry
    """How it lies in its storage."""
    tensor: torch.Tensor | None
    """The tensor itself; None once the recording is over."""


@dataclass(slots=True)
class Value:
    """The content of one storage, from one write to the next."""

    number: int
    nbytes: int
    device: torch.device
    anchor: Geometry
    """The tensor that other tensors on the storage are noted relative to."""
    tensor: torch.Tensor | None
    """The anchor itself; None once the content is written over, or the recording is over."""
    step: int | None = None
    """The step that made it; None: it was there before."""
    held: bool = False
    """Stays through backward in any case: a parameter or buffer, or saved although nothing in the layer made it."""
    trainable: bool = False
    """A parameter that gets a gradient."""
    overwritten: bool = False
    differentiable: bool = False
    """Autograd makes a gradient for it."""
    sightings: list[Sighting] = field(default_factory=list[Sighting])
    """Where it can be taken from when the layer runs again."""


@dataclass(slots=True)
class Write:
    """A step changed a storage in place."""

    before: int
    """Value that was there."""
    after: int
    """Value that is there now."""


@dataclass(slots=True)
class Step:
    """One call of an aten operator, with what is needed to call it again."""

    number: int
    func: Any
    """The operator overload."""
    args: tuple[Any, ...]
    """Arguments; tensors are `Ref`s."""
    kwargs: dict[str, Any]
    path: str
    """Module, below the layer."""
    name: str
    """Call as it stands in Python."""
    aten: str
    node: int
    """Number of the autograd node that it belongs to."""
    reads: tuple[int, ...] = ()
    """Values whose data it needs."""
    made: tuple[int | None, ...] = ()
    """For every tensor it returns, in order: the new value that it made, None for a view of something older."""
    writes: tuple[Write, ...] = ()
    random: torch.Tensor | None = None
    """State of the generator before the call, where the call draws from it."""
    generator: torch.device | None = None
    """Whose default generator that is."""
    flops: float = 0.0
    once: bool = False
    """Cannot be called again: not everything that it does is known."""

    @property
    def results(self) -> tuple[int, ...]:
        """Values that it made, by writing or returning them."""
        return (*(one for one in self.made if one is not None), *(write.after for write in self.writes))


@dataclass(slots=True)
class Saved:
    """A tensor that autograd saved for backward."""

    number: int
    kind: type
    """Class of the tensor as autograd handed it over; a wrapper such as DTensor is still on."""
    size: tuple[int, ...]
    stride: tuple[int, ...] | None
    """None: it is no strided memory."""
    dtype: torch.dtype
    wrappings: tuple[Wrapping, ...]
    """What is round the plain tensor inside."""
    at: Ref | None
    """The plain tensor inside; None if it is no strided memory, and so is always kept."""
    node: int
    """Number of the autograd node that saved it."""
    holds: tuple[int, ...] = ()
    """Values that lie in its memory where it is no plain tensor, so that they stay with it."""
    alive: bool = True
    """The node is still there when the layer has returned. Others lead to nothing that is differentiated."""


@dataclass(slots=True)
class Recording:
    """One forward of one layer."""

    values: list[Value]
    steps: list[Step]
    saved: list[Saved]
    input: int | None
    """Value of the first tensor argument."""
    outputs: tuple[int, ...]
    """Values of the tensors that the layer returned, in order."""
    sure_steps: int
    """Steps before the layer's code takes a number out of a tensor, on which all that follows may depend."""
    sure_saves: int
    """Tensors saved before that."""

    def needed(self, count: int) -> Iterator[Ref]:
        """Where the first `count` saved tensors lie that something still asks for."""
        return (saved.at for saved in self.saved[:count] if saved.alive and saved.at is not None)

    @property
    def reads_data(self) -> bool:
        """Whether some of the layer's code may depend on data."""
        return self.sure_steps < len(self.steps) or self.sure_saves < len(self.saved)

    def release(self) -> None:
        """Let go of all tensors: the steps outlive the forward in plans."""
        for value in self.values:
            value.tensor = None
            for sighting in value.sightings:
                sighting.tensor = None
        for step in self.steps:
            step.random = None

    def taken(self, value: int, source: Source) -> torch.Tensor:
        """The tensor that was seen at a source of a value."""
        for sighting in self.values[value].sightings:
            if sighting.source == source and sighting.tensor is not None:
                return sighting.tensor
        raise missing(f"value {value}")

    def state_before(self, step: int) -> torch.Tensor:
        """The generator before a step that drew from it."""
        state = self.steps[step].random
        if state is None:
            raise missing(f"the generator before step {step}")
        return state
