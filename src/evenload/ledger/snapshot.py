"""Memory snapshots of PyTorch's CUDA allocator as ledgers.

A snapshot (`torch.cuda.memory._dump_snapshot`) has the last events of every device and the segments that the allocator
held in the end. It knows sizes, times and Python lines, and neither modules nor uses. Phases and categories are
inferred from the lines: which of PyTorch's own functions were running.

Format: `torch/cuda/_memory_viz.py` and `torch/csrc/cuda/memory_snapshot.cpp`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from evenload._version import __version__
from evenload.errors import EvenloadError, Notice, shown
from evenload.ledger.builder import Builder
from evenload.ledger.ledger import ALIVE, HostLine, Ledger, Mark, Metadata
from evenload.ledger.plain_pickle import as_dict, as_list, read_plain_pickle
from evenload.ledger.snapshot_frames import Frames
from evenload.ledger.snapshot_phases import Row, assign_categories, marks_of, microseconds
from evenload.ledger.words import MarkKind, Role

ORIGIN: Final = "torch snapshot"
_FREES: Final = frozenset({"free", "free_completed"})
_MAPS: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_LIVE: Final = ("active_allocated", "active_awaiting_free", "active_pending_free")


def read_snapshot(path: str | Path, *, device: int | None = None) -> Ledger:
    """The ledger of one device of a snapshot.

    Args:
        path: a pickle of `torch.cuda.memory._dump_snapshot`.
        device: number of the device; None: the one that held most.

    Raises:
        EvenloadError: the file cannot be read, is no snapshot, asks to run code, or has no such device.
    """
    return snapshot_ledger(read_plain_pickle(path), place=str(path), device=device)


def snapshot_ledger(value: object, *, place: str = "snapshot", device: int | None = None) -> Ledger:
    """The ledger of one device of the value in a snapshot; `place` is what errors call it.

    Raises:
        EvenloadError: it is no snapshot, or has no such device.
    """
    snapshot = _Snapshot.of(value, place)
    devices = snapshot.devices()
    if not devices:
        raise EvenloadError(
            "the snapshot is empty: it has no segments and no events",
            where=place,
            fix="call torch.cuda.memory._record_memory_history() before the work, and dump while tensors are alive",
        )
    chosen = snapshot.busiest() if device is None else device
    if chosen not in devices:
        known = ", ".join(map(str, devices))
        raise EvenloadError(f"the snapshot has no device {chosen}", where=place, fix=f"devices in it: {known}")
    return _Import(snapshot, chosen).ledger()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    """The parts of a snapshot that are read, checked for their types."""

    place: str
    segments: Sequence[Mapping[str, Any]]
    traces: Sequence[Sequence[Mapping[str, Any]]]
    annotations: Sequence[Mapping[str, Any]]
    alloc_conf: str | None

    @classmethod
    def of(cls, value: object, place: str) -> _Snapshot:
        only_segments = as_list(value)  # torch.cuda.memory_snapshot()
        snapshot = as_dict(value) if only_segments is None else {"segments": only_segments}
        if snapshot is None or not {"segments", "device_traces"} & snapshot.keys():
            raise EvenloadError(
                "this is no memory snapshot: it has neither segments nor device_traces",
                where=place,
                fix="write one with torch.cuda.memory._dump_snapshot",
            )
        traces = _list(snapshot.get("device_traces", []), place, "$.device_traces")
        segments = _dicts(snapshot.get("segments", []), place, "$.segments")
        return cls(
            place=place,
            segments=segments,
            traces=[_dicts(trace, place, f"$.device_traces[{number}]") for number, trace in enumerate(traces)],
            annotations=_dicts(snapshot.get("external_annotations", []), place, "$.external_annotations"),
            alloc_conf=_alloc_conf(as_dict(snapshot.get("allocator_settings")), segments),
        )

    def devices(self) -> list[int]:
        """Numbers of the devices that have events or segments."""
        with_segments = {_integer(segment, "device", self.place, 0) for segment in self.segments}
        return sorted(with_segments | {number for number, trace in enumerate(self.traces) if trace})

    def busiest(self) -> int:
        """The device that held most memory in the end; of devices without segments, the one with most events."""
        held: Counter[int] = Counter()
        for segment in self.segments:
            held[_integer(segment, "device", self.place, 0)] += _integer(segment, "total_size", self.place, 0)
        devices = self.devices()
        events = {number: len(trace) for number, trace in enumerate(self.traces)}
        return max(devices, key=lambda number: (held[number], events.get(number, 0)), default=0)


@dataclass(slots=True)
class _Import:
    """Replays the events of one device."""

    snapshot: _Snapshot
    device: int
    frames: Frames = field(default_factory=Frames)
    rows: list[Row] = field(default_factory=list[Row])
    open: dict[int, Row] = field(default_factory=dict[int, Row])
    reserved: list[int] = field(default_factory=list[int])
    marks: list[Mark] = field(default_factory=list[Mark])
    start: int = 0
    lost: int = 0
    """Allocations whose free is not in the trace."""

    def ledger(self) -> Ledger:
        traces = self.snapshot.traces
        events: Sequence[Mapping[str, Any]] = traces[self.device] if self.device < len(traces) else ()
        times = (microseconds(event.get("time_us")) for event in events)
        self.start = min((time for time in times if time is not None), default=0)
        for index, event in enumerate(events, start=1):
            self._event(event, index)
        end = len(events) + 1
        self._blocks()
        return self._build(end)

    def _event(self, event: Mapping[str, Any], index: int) -> None:
        place = self.snapshot.place
        action, address = event.get("action"), _integer(event, "addr", place, index)
        if not isinstance(action, str):
            raise EvenloadError(f"action is {shown(action)} at {index}, which is no text", where=place)
        size = _integer(event, "size", place, index)
        time = self._time(event)
        if action == "alloc":
            if (old := self.open.pop(address, None)) is not None:  # the trace has lost its free
                old.freed = index
                self.lost += 1
            metadata = event.get("user_metadata")
            row = Row(
                nbytes=size,
                allocated=index,
                time=time,
                frames=self.frames.stack(event.get("frames")),
                metadata=metadata if isinstance(metadata, str) and metadata else None,
            )
            row.phase = self.frames.phase(row.frames)
            self.rows.append(row)
            self.open[address] = row
        elif action in _FREES:
            row = self.open.pop(address, None)
            if row is None:
                row = Row(nbytes=size, allocated=0, time=0, frames=-1, roles=Role.BEFORE)
                self.rows.append(row)
            row.freed = index
        elif action in _MAPS:
            self.reserved.append(_MAPS[action] * size)
        elif action == "oom":
            free = _integer(event, "device_free", place, index)
            text = f"out of memory: {size} bytes asked for, {free} free on the device"
            self.marks.append(Mark(kind=MarkKind.FAILED, index=index, time=time, value=size, text=text))

    def _time(self, event: Mapping[str, Any]) -> int:
        time = microseconds(event.get("time_us"))
        return 0 if time is None else (time - self.start) * 1000

    def _blocks(self) -> None:
        """Blocks of the segments that no event made: they are older than the trace."""
        for address, block in _blocks(self.snapshot, self.device):
            if address in self.open:
                continue
            size = block.get("requested_size") or block.get("real_size") or block.get("size")
            row = Row(
                nbytes=_integer({"size": size}, "size", self.snapshot.place, address),
                allocated=0,
                time=0,
                frames=self.frames.stack(block.get("frames") or _history(block)),
                roles=Role.BEFORE,
            )
            self.rows.append(row)

    def _build(self, end: int) -> Ledger:
        builder = Builder()
        device = builder.device(f"cuda:{self.device}")
        phases = marks_of(self.rows, self.snapshot.annotations, self.device, self.start)
        categories = assign_categories(self.rows, phases, self.frames)
        for row, category in zip(self.rows, categories, strict=True):
            builder.allocation(
                nbytes=row.nbytes,
                allocated=row.allocated,
                freed=row.freed,
                time=row.time,
                phase=row.phase,
                category=category,
                roles=row.roles,
                device=device,
                module=row.metadata,
                operator=self.frames.operator(row.frames),
                source=builder.stack(self.frames.lines(row.frames)),
            )
        host = HostLine(step=0, index=end, time=0, resident=-1, pinned=-1, reserved=self._reserved_peak())
        marks = sorted([*phases, *self.marks], key=lambda mark: mark.index)
        return builder.ledger(
            Metadata(
                evenload=__version__,
                origin=ORIGIN,
                device=f"cuda:{self.device}",
                rank=self.device,
                stacks=self.frames.known,
                alloc_conf=self.snapshot.alloc_conf,
            ),
            end=end,
            marks=[replace(mark, index=min(mark.index, end)) for mark in marks],
            host=(host,),
            notices=self._notices(),
        )

    def _reserved_peak(self) -> int:
        """Most that the allocator held: the end is known from the segments, the way there from the events."""
        final = sum(
            _integer(segment, "total_size", self.snapshot.place, 0)
            for segment in self.snapshot.segments
            if _integer(segment, "device", self.snapshot.place, 0) == self.device
        )
        if not self.snapshot.segments and not self.reserved:
            return -1
        changes = np.cumsum(np.array([0, *self.reserved], dtype=np.int64))
        begin = final - int(changes[-1]) if self.snapshot.segments else 0
        return max(final, begin + int(changes.max()))

    def _notices(self) -> list[Notice]:
        notices: list[Notice] = []
        if not self.frames.known:
            notices.append(
                Notice(
                    fact="the snapshot has no Python lines, so neither phases nor categories can be told",
                    where=self.snapshot.place,
                    fix="record with torch.cuda.memory._record_memory_history(stacks='python')",
                )
            )
        before = sum(row.nbytes for row in self.rows if row.roles & Role.BEFORE and row.freed == ALIVE)
        if before and self.device < len(self.snapshot.traces):
            notices.append(
                Notice(
                    fact=f"{before} bytes are older than the events of the snapshot: who made them is not known",
                    where=self.snapshot.place,
                    fix="start _record_memory_history before the model is built, with a larger max_entries",
                )
            )
        return notices


def _blocks(snapshot: _Snapshot, device: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Address and block of everything that is in use at the end."""
    for number, segment in enumerate(snapshot.segments):
        if _integer(segment, "device", snapshot.place, 0) != device:
            continue
        address = _integer(segment, "address", snapshot.place, 0)
        for block in _dicts(segment.get("blocks", []), snapshot.place, f"$.segments[{number}].blocks"):
            at = address if block.get("address") is None else _integer(block, "address", snapshot.place, address)
            if block.get("state") in _LIVE:
                yield at, block
            address = at + _integer(block, "size", snapshot.place, at)


def _alloc_conf(settings: Mapping[str, Any] | None, segments: Sequence[Mapping[str, Any]]) -> str | None:
    """The allocator settings that were on: as they were written, else what their effect tells; None: nothing tells."""
    told = settings or {}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        if isinstance(written := told.get(name), str) and written.strip():
            return written
    if told.get("expandable_segments") is True or any(one.get("is_expandable") is True for one in segments):
        return "expandable_segments:True"
    return "" if told else None


def _history(block: Mapping[str, Any]) -> object:
    """Frames of a block as PyTorch 2.0 wrote them."""
    history = as_list(block.get("history"))
    newest = as_dict(history[0]) if history else None
    return newest.get("frames") if newest else None


def _list(value: object, place: str, path: str) -> list[Any]:
    items = as_list(value)
    if items is None:
        raise EvenloadError(f"{path} is no list", where=place, fix="write the snapshot again")
    return items


def _dicts(value: object, place: str, path: str) -> list[dict[str, Any]]:
    items = _list(value, place, path)
    found = [item for item in map(as_dict, items) if item is not None]
    if len(found) != len(items):
        wrong = next(number for number, item in enumerate(items) if as_dict(item) is None)
        raise EvenloadError(f"{path}[{wrong}] is no dictionary", where=place, fix="write the snapshot again")
    return found


def _integer(item: Mapping[str, Any], name: str, place: str, at: int) -> int:
    value = item.get(name, 0)
    if type(value) is int and 0 <= value < 2**62:
        return value
    raise EvenloadError(f"{name} is {shown(value)} at {at}, which is no number that can stand there", where=place)
