"""What a recording is made of: values, the steps that make them, and the tensors that autograd saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from evenload.recompute.errors import missing
from evenload.recompute.geometry import Geometry, Ref


class Source(NamedTuple):
    """Where the tensor of a value can be taken from while the layer runs."""

    kind: str
    """`argument`, `parameter`, `pack`, `module` or `step`."""
    at: tuple[Any, ...]
    """Which one: (position,), (dotted name,), (number of the save,), (path, call, "in" or "out", position), (number of
    the step, result)."""


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
    sources: list[tuple[Source, Geometry]] = field(default_factory=list[tuple[Source, Geometry]])
    """Where it can be taken from when the layer runs again, and how the tensor there lies."""


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
    tensor: torch.Tensor
    """As autograd handed it over; a wrapper such as DTensor is still on."""
    at: Ref | None
    """The plain tensor inside; None if it is no strided memory, and so is always kept."""
    node: int
    """Number of the autograd node that saved it."""


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
    reads_data: bool
    """Some operator took a number out of a tensor, on which the code that followed may depend."""

    def live(self, value: int) -> torch.Tensor:
        """The anchor of a value that was not written over."""
        tensor = self.values[value].tensor
        if tensor is None:
            raise missing(f"value {value}")
        return tensor

    def state_before(self, step: int) -> torch.Tensor:
        """The generator before a step that drew from it."""
        state = self.steps[step].random
        if state is None:
            raise missing(f"the generator before step {step}")
        return state
