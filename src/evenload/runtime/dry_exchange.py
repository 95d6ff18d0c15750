"""How PyTorch's pipeline schedules exchange tensors on a process group that sends nothing."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from evenload.runtime._torch_private import InferenceMode, PipelineSchedule, schedules

_WARM_UP: Final = "_warmup_p2p"
_MODE: Final = "_inference_mode"
_EXCHANGE: Final = "_batch_p2p"


@contextmanager
def exchanging_nothing(*, waits_release: bool) -> Generator[None]:
    """Let schedules run without partners, and hold on to tensors as they would with them.

    Stages would ask each other whether shapes are told, and read the answer; here they are told that they are. A
    process group that sends holds every tensor that is on its way; one that sends nothing holds none, so what stands
    for its work does.

    Source: `SendWork` in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp keeps its tensor for as long as it lives;
    `WorkNCCL` in ProcessGroupNCCL.cpp keeps it in `stashed_for_allocator_safety_` until somebody waits for it.

    Args:
        waits_release: waiting for a tensor to be sent lets go of it (NCCL); else that happens when the schedule forgets
            that it has sent it (gloo).
    """
    warm_up, exchange = getattr(PipelineSchedule, _WARM_UP), getattr(schedules, _EXCHANGE)

    def told(_schedule: Any, stages: list[Any], *_args: Any, **_kwargs: Any) -> None:
        for stage in stages:
            setattr(stage, _MODE, InferenceMode.STATIC)

    def held(operations: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        works = exchange(operations, *args, **kwargs)
        tensors = [operation.tensor for operation in operations]
        return [_Work(work, tensors, waits_release=waits_release) for work in works]

    setattr(PipelineSchedule, _WARM_UP, told)
    setattr(schedules, _EXCHANGE, held)
    try:
        yield
    finally:
        setattr(PipelineSchedule, _WARM_UP, warm_up)
        setattr(schedules, _EXCHANGE, exchange)


class _Work:
    """Tensors on their way."""

    def __init__(self, work: Any, tensors: list[Any], *, waits_release: bool) -> None:
        self._work = work
        self._tensors = tensors
        self._waits_release = waits_release

    def wait(self) -> Any:
        """Wait until they have arrived."""
        done = self._work.wait()
        if self._waits_release:
            self._tensors = []
        return done
