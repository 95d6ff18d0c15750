"""Out-of-memory messages explained: as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenload.ledger.oom import OutOfMemory
from evenload.ledger.oom_reasons import Explanation
from evenload.ledger.settings import AllocConf
from evenload.report.table import columns
from evenload.units import human_bytes


def as_json(explanations: Sequence[Explanation], conf: AllocConf | None) -> dict[str, Any]:
    """Every message with what follows from it, in bytes; null: the message does not say."""
    return {
        "oom": [_message(explanation) for explanation in explanations],
        "settings": None if conf is None else conf.settings,
    }


def _message(explanation: Explanation) -> dict[str, Any]:
    message = explanation.message
    return {
        "device": message.device,
        "allocator": message.allocator,
        "rank": message.rank,
        "line": message.line,
        "count": message.count,
        "source": message.source,
        "asked": message.asked,
        "capacity": message.capacity,
        "allowed": message.allowed,
        "free": message.free,
        "allocated": message.allocated,
        "private_pools": message.private,
        "unallocated": message.unallocated,
        "reserved": message.reserved,
        "process": message.process,
        "outside_pytorch": message.outside,
        "other_processes": message.elsewhere,
        "reason": explanation.reason,
        "facts": explanation.facts,
        "advice": explanation.advice,
    }


def as_text(explanations: Sequence[Explanation], conf: AllocConf | None) -> str:
    """Every message for the screen."""
    blocks = [_block(explanation) for explanation in explanations]
    if conf is not None:
        settings = ",".join(f"{key}:{value}" for key, value in conf.settings.items()) or "none"
        blocks.append(f"allocator settings that were on: {settings}")
    return "\n\n".join(blocks)


def _block(explanation: Explanation) -> str:
    message = explanation.message
    asked = "" if message.asked is None else f" for {human_bytes(message.asked)}"
    rank = "" if message.rank is None else f" on rank {message.rank}"
    times = "" if message.count == 1 else f", {message.count} times"
    lines = [f"line {message.line}: {message.device}{rank} had no room{asked}{times}"]
    if message.source:
        lines.append(f"  asked in {message.source}")
    if rows := _rows(message):
        lines += ["", *(f"  {line}" for line in columns(("bytes", "what"), rows, left=(1,)).splitlines()), ""]
    lines += [f"  {fact}" for fact in explanation.facts]
    for number, advice in enumerate(explanation.advice, start=1):
        lines.append(f"  {number}. {advice.text}")
        if advice.write:
            lines.append(f"     {advice.write}")
    return "\n".join(lines)


def _rows(message: OutOfMemory) -> list[tuple[str, str]]:
    parts = (
        (message.allocated, "PyTorch's tensors"),
        (message.private, "  of them in private pools (CUDA graphs)"),
        (message.unallocated, "held by PyTorch, used by no tensor"),
        (message.outside, "this process, outside PyTorch's allocator"),
        (message.elsewhere if message.process is not None or message.others else None, "other processes"),
        (message.unexplained, "in use beside PyTorch, by whom is not said"),
        (message.free, "free"),
        (message.allowed, "limit of this process"),
        (message.capacity, "the device"),
    )
    return [(human_bytes(nbytes), name) for nbytes, name in parts if nbytes is not None]
