"""Bytes counted by others.

The profiler of PyTorch knows nothing of dispatch, storages or Python; memray sees the calls of the C library's
allocator, and knows nothing of PyTorch.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import evenload
from evenload.ledger.curve import curve

MARK = "operator ended"


class Marker(TorchDispatchMode):
    """Entered inside a recording: after every operator it marks the profiler's stream and notes the ledger's clock."""

    def __init__(self, recording):
        super().__init__()
        self._storages = recording.core.storages
        self.clocks = []
        self.numbers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.clocks.append(self._storages.settle() - 1)
        self.numbers.append(_numbers(func, args))
        with torch._C._profiler._RecordFunctionFast(MARK):
            pass
        return result


def _numbers(func, args):
    """Bytes of Python numbers in the place of tensors: they are tensors for as long as the call lasts."""
    pairs = zip(args, func._schema.arguments, strict=False)
    return sum(8 for value, argument in pairs if type(value) in (int, float) and str(argument.type) == "Tensor")


@dataclass
class Both:
    """The same run, counted twice."""

    ledger: object
    profiler_peak: int
    profiler_levels: np.ndarray
    """After every operator."""
    recorded_levels: np.ndarray

    @property
    def peak(self):
        return curve(self.ledger).peak


def counted_twice(run, **options):
    """Run a function under the profiler and under the recorder, from before its model exists until after it is gone."""
    activities = [ProfilerActivity.CPU]
    with (
        profile(activities=activities, profile_memory=True) as profiler,
        evenload.record(**options) as recording,
        Marker(recording) as marker,
    ):
        run(recording)
    events = profiler.profiler.kineto_results.events()
    memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    ends = sorted(event.start_ns() for event in events if event.name() == MARK)
    times = np.array([time for time, _ in memory])
    running = np.cumsum([nbytes for _, nbytes in memory])
    assert len(ends) == len(marker.clocks)
    position = np.searchsorted(times, ends, side="right") - 1
    ledger = recording.ledger
    recorded = curve(ledger, rows=np.array([ledger.devices[code] == "cpu" for code in ledger.allocations.device]))
    return Both(
        ledger=ledger,
        profiler_peak=int(running.max()),
        profiler_levels=np.where(position >= 0, running[position], 0) - marker.numbers,
        recorded_levels=np.array([recorded.at(clock) for clock in marker.clocks]),
    )


def memray_peak(run):
    """Most bytes that PyTorch held while a function ran: it takes all its memory aligned, and nobody else does.

    Call the function once before: what PyTorch makes once in a process is not its.
    """
    from memray import AllocatorType, FileReader, Tracker

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "allocations"
        with Tracker(path):
            run()
        held, level, peak = {}, 0, 0
        for record in FileReader(path).get_allocation_records():
            if record.allocator == AllocatorType.POSIX_MEMALIGN:
                held[record.address] = record.size
                level += record.size
                peak = max(peak, level)
            elif record.allocator == AllocatorType.FREE:
                level -= held.pop(record.address, 0)
    return peak
