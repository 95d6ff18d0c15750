"""The words of a ledger: phases, categories, what a storage turned out to be, kinds of marks.

Codes are what the file holds; they never change meaning, new words are added at the end.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag, StrEnum
from typing import Final

from evenload.profile.profile import Line


class Phase(StrEnum):
    """What the step was doing when an allocation was made."""

    OTHER = "other"
    """Between the phases below: building the model, loading data, logging."""
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """Forward again, inside backward."""
    OPTIMIZER = "optimizer"

    @property
    def code(self) -> int:
        """Position in the enum: how columns and files name the phase."""
        return PHASES.index(self)


PHASES: Final[tuple[Phase, ...]] = tuple(Phase)


class Category(StrEnum):
    """What an allocation was for."""

    TEMPORARY = "temporary"
    PARAMETER = "parameter"
    """Parameters and buffers of modules."""
    GRADIENT = "gradient"
    """What a parameter's `.grad` held, sharded or not."""
    OPTIMIZER = "optimizer state"
    """State of optimizers, and parameters that only an optimizer holds (main copies)."""
    ACTIVATION = "activation"
    """Made in forward (or recompute) and found alive by the backward that follows."""
    COMMUNICATION = "communication buffer"
    """Written by a collective or a receive, gathered parameters included, and not one of the above."""
    INPUT = "input"
    """Made outside the phases and read by forward: batches, labels, masks."""
    UNKNOWN = "unknown"
    """Imported from a format that does not tell."""

    @property
    def code(self) -> int:
        """Position in the enum: how columns and files name the category."""
        return CATEGORIES.index(self)

    @property
    def line(self) -> Line:
        """The memory line that predictions and reports count it in."""
        return _LINES[self]


CATEGORIES: Final[tuple[Category, ...]] = tuple(Category)

_LINES: Final = {
    Category.TEMPORARY: Line.TRANSIENT,
    Category.PARAMETER: Line.PARAMETERS,
    Category.GRADIENT: Line.GRADIENTS,
    Category.OPTIMIZER: Line.OPTIMIZER,
    Category.ACTIVATION: Line.KEPT,
    Category.COMMUNICATION: Line.BUFFERS,
    Category.INPUT: Line.KEPT,
    Category.UNKNOWN: Line.TRANSIENT,
}


class Role(IntFlag):
    """Facts about a storage that its category follows from, together with when it was alive."""

    NONE = 0
    PARAMETER = 1
    """A module's parameter or buffer."""
    GRADIENT = 2
    OPTIMIZER = 4
    INPUT = 8
    """Made outside the phases and read by forward."""
    COLLECTIVE = 16
    """Written by a collective."""
    BUFFER = 32
    """Made for communication whatever its life: gathered parameters, gradient buckets, receive buffers."""
    GRAPH = 64
    """Made in backward while that backward was itself recorded for another one (`create_graph=True`)."""
    BEFORE = 128
    """Was there when the recording began."""
    COLLECTED = 256
    """Freed by Python's garbage collector: only a reference cycle held it."""


class Hold(IntEnum):
    """How an allocation that outlived its step was held when the recording ended."""

    RETAINED = 0
    """By a variable that is still there."""
    CYCLE = 1
    """By objects that refer to each other, until the garbage collector runs."""
    UNREACHABLE = 2
    """By nothing that Python can reach, and the garbage collector does not free it."""


class MarkKind(IntEnum):
    """What a mark says about the point at which it stands."""

    STEP = 0
    """A step begins; the value is its number."""
    PHASE = 1
    """A phase begins; the value is its code."""
    FAILED = 2
    """An allocation failed; the value is the bytes asked for where known, the text is the message."""
    NOTE = 3
    """The text says something about the recording."""
