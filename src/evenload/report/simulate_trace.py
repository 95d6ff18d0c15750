"""A timeline in the Chrome trace format, which Perfetto and chrome://tracing open.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from typing import Any

from evenload.plan.schedule import Op
from evenload.simulate.timeline import Timeline

_NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward"}


def chrome_trace(timeline: Timeline) -> str:
    """The trace as JSON: one row a rank with its actions, one counter a rank with its memory.

    Seconds become microseconds, the unit of the format; a table's own time units are written as if they were.
    """
    scale = 1e6 if timeline.time_unit == "seconds" else 1.0
    events: list[dict[str, Any]] = []
    for rank in range(timeline.graph.pp):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        times, levels = timeline.curve(rank)
        events += [
            {"ph": "C", "name": f"memory of rank {rank}", "pid": 0, "ts": time * scale, "args": {unit: level}}
            for unit in (timeline.memory_unit,)
            for time, level in zip(times.tolist(), levels.tolist(), strict=True)
        ]
    events += [
        {
            "ph": "X",
            "name": f"{action.op}{action.micro_batch}",
            "cat": _NAMES[action.op],
            "pid": 0,
            "tid": action.rank,
            "ts": action.start * scale,
            "dur": (action.end - action.start) * scale,
            "args": {"chunk": action.chunk, "micro_batch": action.micro_batch},
        }
        for action in timeline.actions
    ]
    other = {"schedule": timeline.schedule, "time_unit": timeline.time_unit, "memory_unit": timeline.memory_unit}
    return json.dumps({"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}) + "\n"
