"""Samples of memory over time as people write them down: JSON with numbers and a unit.

{"MiB": [49258, 61558, 76124], "event": "after each checkpoint save", "device_MiB": 81559}
{"baseline_GB": [30, 30], "peak_GB": {"0": 33, "500": 52}}
{"peak_GB": {"0": 33, "500": 34}, "end": 80}
{"allocated_GiB": [20, 20], "reserved_GiB": [24, 37]}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from evenload.errors import EvenloadError, shown
from evenload.files import parse_json
from evenload.ledger.plain_pickle import as_list
from evenload.ledger.series import Series
from evenload.units import parse_bytes

_WORDS: Final = {
    **dict.fromkeys(("", "baseline", "between_steps", "allocated", "memory_allocated", "used", "in_use"), "baseline"),
    **dict.fromkeys(("gpu", "gpu_memory", "cuda", "npu", "host", "rss", "cpu", "ram", "resident"), "baseline"),
    **dict.fromkeys(("peak", "max", "max_allocated", "max_memory_allocated", "peak_allocated"), "peak"),
    **dict.fromkeys(("reserved", "cached", "memory_reserved", "max_memory_reserved", "peak_reserved"), "reserved"),
    **dict.fromkeys(("device", "capacity", "total", "limit", "device_memory", "memory"), "capacity"),
}
"""What names of samples mean; `memory` is the device's where it is one number."""
_KEY: Final = re.compile(
    rf"(?:(?P<what>{'|'.join(sorted(filter(None, _WORDS), key=len, reverse=True))})_?)?"
    r"(?P<unit>(?:[KMGT]i?)?B|bytes)?",
    re.IGNORECASE,
)
_END: Final = "end"
"""The last sample, at a step that nobody noted, in the unit of the others."""
_OTHERS: Final = frozenset({"event", "unit", "steps", "facts", _END})


def looks_like_series(text: str) -> bool:
    """Whether a text may be samples: a JSON object with a key that names a unit or a baseline."""
    head = re.match(r'\s*\{\s*"([^"]+)"', text)
    return head is not None and (head[1] in _OTHERS or _KEY.fullmatch(head[1]) is not None)


def series_in(text: str, *, place: str) -> Series:
    """The samples in a JSON text; `place` is what errors call it.

    Raises:
        EvenloadError: it is no JSON object, has an unknown key, no unit, or values that are no samples.
    """
    value = parse_json(text, name=place)
    if not isinstance(value, dict):
        raise EvenloadError("samples are a JSON object", where=place, fix='write {"MiB": [49258, 61558]}')
    given = cast("dict[str, Any]", value)
    found: dict[str, Any] = {}
    for key, content in given.items():
        if key in _OTHERS:
            continue
        match = _KEY.fullmatch(key)
        if match is None:
            raise EvenloadError(
                f"{key!r} is no name of samples",
                where=place,
                fix="use allocated, reserved, peak or device with a unit: peak_GiB",
            )
        role = _WORDS[(match["what"] or "").lower()]
        if role == "capacity" and isinstance(content, list | dict) and len(cast("Sequence[Any]", content)) > 1:
            role = "baseline"
        if role in found:
            raise EvenloadError(f"{key!r} and {found[role][2][2:]!r} are two names of one thing", where=place)
        found[role] = (content, match["unit"] or given.get("unit"), f"$.{key}")
    baseline, at = _samples(found.get("baseline"), place)
    peak, peak_at = _samples(found.get("peak"), place)
    reserved, reserved_at = _samples(found.get("reserved"), place)
    capacity, _ = _samples(found.get("capacity"), place)
    if _END in given and (samples := found.get("peak") or found.get("baseline")) is not None:
        last, _ = _samples((given[_END], samples[1], f"$.{_END}"), place)
        baseline, peak = (baseline, (*peak, *last)) if peak else ((*baseline, *last), peak)
        at = peak_at = ()
    steps = as_list(given.get("steps", []))
    if steps is None or any(type(step) is not int for step in steps):
        raise EvenloadError("steps are a list of numbers", where=place)
    event = given.get("event")
    return Series(
        baseline=baseline,
        peak=peak,
        reserved=reserved,
        at=tuple(steps) or at or peak_at or reserved_at,
        event=event if isinstance(event, str) else None,
        capacity=capacity[0] if capacity else None,
    )


def _samples(given: tuple[Any, Any, str] | None, place: str) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Bytes, and the steps that a JSON object names them by."""
    if given is None:
        return (), ()
    content, unit, path = given
    where = f"{place}: {path}"
    if not isinstance(unit, str):
        raise EvenloadError("the samples have no unit", where=where, fix="name it in the key: baseline_MiB")
    factor = 1 if unit.lower() == "bytes" else parse_bytes(f"1{unit}", where=where)
    if isinstance(content, Mapping):
        named = sorted((_step(key, where), value) for key, value in cast("dict[str, Any]", content).items())
        return tuple(_number(value, where) * factor for _, value in named), tuple(step for step, _ in named)
    values = cast("list[Any]", content) if isinstance(content, list) else [content]
    return tuple(_number(value, where) * factor for value in values), ()


def _step(key: str, where: str) -> int:
    if not re.fullmatch(r"\d{1,12}", key):
        raise EvenloadError(f"{key!r} is no number of a step", where=where)
    return int(key)


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise EvenloadError(f"{shown(value)} is no amount of memory", where=where)
    return float(value)
