"""The `Ledger` value: every allocation of a recording, in columns, with the strings that the columns name.

Time is counted in events: every allocation, every free and the end of every operator is one. An operator's end comes
after the allocations of its results, so that inputs and results of one operator are needed together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.errors import Notice
from evenload.ledger.words import Hold, MarkKind, Phase

ALIVE: Final = int(np.iinfo(np.int64).max)
"""`freed` of an allocation that was still there when the recording ended."""
HOST_DEVICES: Final = ("cpu", "pinned", "foreign")
"""Device names that are memory of the host: PyTorch's, page-locked, and what PyTorch only borrows (NumPy, files)."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """Where a ledger comes from."""

    evenload: str
    """Version that wrote it."""
    origin: str = "recorded"
    """`recorded` (a real run), `dry run`, or the format that it was imported from."""
    torch: str | None = None
    """Version of PyTorch."""
    device: str | None = None
    """Device whose memory is followed, `cuda:0`; None: the first accelerator that appears, else `cpu`."""
    rank: int = 0
    world: int = 1
    started: float = 0.0
    """Seconds since the epoch at which the recording began."""
    command: tuple[str, ...] = ()
    """Script and arguments, where a script was tracked."""
    stacks: bool = False
    """Whether Python source lines were recorded."""
    alloc_conf: str | None = None
    """Settings of the device's allocator that were on, empty for none; None: not known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocations:
    """Columns, one entry per allocation, in order of allocation."""

    nbytes: NDArray[np.int64]
    allocated: NDArray[np.int64]
    """Index of the event; 0: was there when the recording began."""
    last_used: NDArray[np.int64]
    """Index of the end of the last operator that read or wrote it, its maker included; 0: none did."""
    freed: NDArray[np.int64]
    """Index of the event; `ALIVE`: never."""
    time: NDArray[np.int64]
    """Nanoseconds since the recording began."""
    phase: NDArray[np.uint8]
    """`Phase` codes."""
    category: NDArray[np.uint8]
    """`Category` codes."""
    roles: NDArray[np.uint16]
    """`Role` bits."""
    device: NDArray[np.uint8]
    """Position in `Ledger.devices`."""
    micro_batch: NDArray[np.int32]
    """Number within the step; -1: not known."""
    module: NDArray[np.int32]
    """Module path: position in `Ledger.strings`; -1: made outside modules."""
    operator: NDArray[np.int32]
    """Operator: position in `Ledger.strings`; -1: not known."""
    source: NDArray[np.int32]
    """Innermost Python frame: position in `Ledger.frames`; -1: not recorded."""
    previous: NDArray[np.int64]
    """The allocation that this one replaced when its storage was resized; -1: none."""
    reach: NDArray[np.int64]
    """Largest part of it that a tensor still refers to, in bytes, where a view keeps it alive; -1: not known."""
    made: NDArray[np.int64]
    """Index at which its maker ran, where that is not the index of the allocation; -1: it is."""

    def __len__(self) -> int:
        return len(self.nbytes)

    def take(self, rows: NDArray[Any]) -> Allocations:
        """The allocations at `rows` (positions or a mask)."""
        return Allocations(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One line of Python that was running."""

    location: str
    """`file:line function`."""
    caller: int
    """Position of the calling frame in `Ledger.frames`; -1: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A point in the order of events."""

    kind: MarkKind
    index: int
    """Events before it have a smaller index; it comes before the event with this one."""
    time: int
    """Nanoseconds since the recording began."""
    value: int = 0
    micro_batch: int = -1
    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Who held an allocation when the recording ended."""

    row: int
    hold: Hold
    chain: str
    """From the variable or object that holds it down to the tensor, in words."""
    source: str | None = None
    """`file:line` at which that variable or attribute is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLine:
    """The process and the device's allocator at the end of a step."""

    step: int
    index: int
    time: int
    resident: int
    """Resident set of the process in bytes; -1: the system does not tell."""
    pinned: int
    """Page-locked bytes of this process; -1: not known."""
    reserved: int = -1
    """Most bytes that the device's allocator held during the step; -1: it does not tell."""
    idle: int = -1
    """Bytes that the C allocator of the process had and nobody used; -1: it does not tell."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ledger:
    """Every allocation of a recording."""

    metadata: Metadata
    allocations: Allocations
    end: int
    """Index after the last event."""
    strings: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    frames: tuple[Frame, ...] = ()
    marks: tuple[Mark, ...] = ()
    host: tuple[HostLine, ...] = ()
    owners: tuple[Owner, ...] = ()
    """Holders of allocations that outlived their step, one allocation per place that makes them or more."""
    complete: bool = True
    """Whether the recording ended by itself; otherwise it breaks off where the process ended."""
    notices: tuple[Notice, ...] = field(default=())

    @cached_property
    def device(self) -> str:
        """The device whose memory is followed."""
        if self.metadata.device is not None:
            return self.metadata.device
        return next((name for name in self.devices if name not in HOST_DEVICES), "cpu")

    @cached_property
    def on_device(self) -> NDArray[np.bool_]:
        """Which allocations are memory of the followed device; the others are memory of the host."""
        if self.device not in self.devices:
            return np.zeros(len(self.allocations), dtype=np.bool_)
        return self.allocations.device == self.devices.index(self.device)

    @cached_property
    def step_begins(self) -> NDArray[np.int64]:
        """Index at which every step begins."""
        return np.array([mark.index for mark in self.marks if mark.kind is MarkKind.STEP], dtype=np.int64)

    @cached_property
    def steps(self) -> int:
        """Steps that the recording saw, the last one perhaps in part; after the last, nothing is one."""
        begins = self.step_begins
        if len(begins) < 2:
            return len(begins)
        phases = [mark.index for mark in self.marks if mark.kind is MarkKind.PHASE and mark.value != Phase.OTHER.code]
        last = max(phases, default=-1)
        return len(begins) - 1 if begins[-2] <= last < begins[-1] else len(begins)

    def step_of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of the step that events belong to; -1: before the first."""
        return np.searchsorted(self.step_begins, index, side="right") - 1

    def module(self, row: int) -> str | None:
        """Module path of an allocation, empty for the model itself; None: made outside modules."""
        return self._string(self.allocations.module[row])

    def operator(self, row: int) -> str | None:
        """Operator that made an allocation."""
        return self._string(self.allocations.operator[row])

    def source(self, row: int) -> str | None:
        """Python line that made an allocation: `file:line function`."""
        return stack[0] if (stack := self.stack(row)) else None

    def stack(self, row: int) -> tuple[str, ...]:
        """Python lines that led to an allocation, innermost first."""
        lines: list[str] = []
        frame = int(self.allocations.source[row])
        while frame >= 0:
            lines.append(self.frames[frame].location)
            frame = self.frames[frame].caller
        return tuple(lines)

    def _string(self, position: int) -> str | None:
        return self.strings[position] if position >= 0 else None
