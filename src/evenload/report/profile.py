"""What was measured, as a table."""

from __future__ import annotations

from typing import Any, Final

from evenload.profile.measured import Measured, Spread
from evenload.units import human_bytes

BUSY: Final = 0.9
"""A process that runs for a smaller share of the time is kept from its work."""


def profile_text(measured: Measured) -> str:
    """Times of every kind of layer under every choice."""
    width = max(map(len, measured.times))
    lines = [
        f"{measured.model}: {measured.measured_at}",
        "",
        f"{'':{width}}  recompute   forward ms            backward ms           optimizer ms",
    ]
    for kind, times in measured.times.items():
        for run in times.runs:
            update = _shown(times.update) if run is times.runs[0] else ""
            lines.append(
                f"{kind:{width}}  {run.policy.choice.value:<11} {_shown(run.forward):<21} {_shown(run.backward):<21} "
                f"{update}".rstrip()
            )
    chunk = measured.chunk
    lines.append(f"{'a chunk besides':{width}}  {'':<11} {_shown(chunk.forward):<21} {_shown(chunk.backward)}")
    lines += ["", "In brackets: half of the rounds lay between. Backward includes what is recomputed.", _sent(measured)]
    if measured.conditions.device == "cpu":
        threads = measured.conditions.threads
        lines.append(f"It holds for runs with as many threads a process: OMP_NUM_THREADS={threads}")
    share = measured.conditions.share
    if share is not None and share < BUSY:
        lines.append(
            f"Other programs had the processors for {1 - share:.0%} of the time: these are times under that load"
        )
    return "\n".join(lines)


def profile_answer(measured: Measured) -> dict[str, Any]:
    """The same numbers, in seconds."""
    return {
        "model": measured.model,
        "conditions": measured.conditions,
        "times": measured.times,
        "chunk": measured.chunk,
        "transfer": measured.transfer,
        "bandwidth": measured.bandwidth,
    }


def _sent(measured: Measured) -> str:
    nbytes = human_bytes(measured.traced.boundary)
    if measured.bandwidth is not None:
        return f"{nbytes} from rank to rank: {measured.traced.boundary / measured.bandwidth * 1e3:.3g} ms, as stated"
    if measured.transfer is not None:
        return f"{nbytes} from rank to rank: {_shown(measured.transfer)} ms"
    return f"{nbytes} from rank to rank: not measured by one process; start two with torchrun, or give --bandwidth"


def _shown(spread: Spread) -> str:
    low, median, high = (f"{1e3 * one:.3g}" for one in (spread.low, spread.median, spread.high))
    return f"{median} ({low}-{high})"
