"""Write the golden schedules of PyTorch: `python tests/plan/make_golden_torch.py [TARGET]` (torch, no device).

Orders come from `torch.distributed.pipelining` itself. GPipe and interleaved 1F1B are read from `pipeline_order`. 1F1B
is recorded from what `Schedule1F1B` really runs on a stand-in stage, because its `pipeline_order`, which PyTorch uses
for drawing only, numbers the micro-batches of the last rank from 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

from golden_orders import FOLDER, Order, compact, write
from torch.distributed.pipelining import schedules

LETTER = {"FORWARD": "F", "FULL_BACKWARD": "B"}


def stand_in(index: int, rank: int, pp: int, chunks: int) -> MagicMock:
    stage = MagicMock()
    stage.num_stages, stage.group_size, stage.group_rank = pp * chunks, pp, rank
    stage.device, stage.inputs_meta, stage.has_backward = "cpu", (), True
    stage.stage_index, stage.is_first, stage.is_last = index, index == 0, index == pp * chunks - 1
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    return stage


def listed(schedule: object, pp: int) -> list[Order]:
    """The order that a schedule lists."""
    return [
        [
            (LETTER[action.computation_type.name], action.stage_index // pp, action.microbatch_index)
            for action in schedule.pipeline_order[rank]
            if action is not None and action.computation_type.name in LETTER
        ]
        for rank in range(pp)
    ]


def executed_1f1b(pp: int, micro_batches: int) -> list[Order]:
    """The order that `Schedule1F1B` runs."""
    ranks: list[Order] = []
    for rank in range(pp):
        stage, done = stand_in(rank, rank, pp, 1), []
        stage.forward_one_chunk.side_effect = lambda index, *_, done=done, **__: done.append(("F", 0, index))
        stage.backward_one_chunk.side_effect = lambda index, *_, done=done, **__: done.append(("B", 0, index))
        schedule = schedules.Schedule1F1B(stage, micro_batches)
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, None, None)
        ranks.append(done)
    return ranks


def orders(name: str, pp: int, chunks: int, micro_batches: int) -> list[Order] | None:
    """Orders of every rank, or None where PyTorch refuses the sizes."""
    try:
        if name == "1f1b":
            return executed_1f1b(pp, micro_batches)
        if name == "gpipe":
            return listed(schedules.ScheduleGPipe(stand_in(0, 0, pp, 1), micro_batches), pp)
        stages = [stand_in(chunk * pp, 0, pp, chunks) for chunk in range(chunks)]
        return listed(schedules.ScheduleInterleaved1F1B(stages, micro_batches), pp)
    except ValueError:
        return None


def cases() -> Iterator[dict[str, object]]:
    for pp in range(2, 9):
        for name, chunks in (("gpipe", 1), ("1f1b", 1), *(("interleaved_1f1b", chunks) for chunks in (1, 2, 3))):
            for micro_batches in sorted({1, 2, pp - 1, pp, pp + 1, 2 * pp, 2 * pp + 1, 2 * pp + 2, 3 * pp}):
                ranks = orders(name, pp, chunks, micro_batches)
                case = {"schedule": name, "pp": pp, "interleave": chunks, "micro_batches": micro_batches}
                yield case | (compact(ranks) if ranks else {"refused": True})


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "torch.jsonl", cases())
