"""Sets of layers from short text: `0-3,8` is layers 0, 1, 2, 3 and 8. `plan/layer_ranges` writes it."""

from __future__ import annotations

import re
from typing import Any, Final, cast

from evenload.errors import EvenloadError
from evenload.plan.layer_ranges import NONE
from evenload.plan.policy import Layers

_RANGE: Final = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")
ALL: Final = "all"
"""Every layer, where a reader knows how many there are."""


def read_ranges(value: Any, num_layers: int, *, where: str) -> Layers:
    """The layers of a text such as `0-3,8`, a number, or a list of both; `all` and `none` are words.

    Raises:
        EvenloadError: no such text, or a layer that the model does not have; its place begins with `where`, a `$.path`.
    """
    if isinstance(value, list):
        items = cast("list[Any]", value)
        parts = [read_ranges(item, num_layers, where=f"{where}[{place}]") for place, item in enumerate(items)]
        return frozenset[int]().union(*parts)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise EvenloadError(f"{value!r} names no layers", where=where, fix="write layers such as 0-3,8")
    text = str(value).strip()
    if text == ALL:
        return frozenset(range(num_layers))
    if text in (NONE, ""):
        return frozenset()
    layers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise EvenloadError(f"{part.strip()!r} is no range of layers", where=where, fix="write such as 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise EvenloadError(f"the range {first}-{last} runs backwards", where=where, fix=f"write {last}-{first}")
        if last >= num_layers:
            raise EvenloadError(
                f"there is no layer {last}: the model has {num_layers} layers",
                where=where,
                fix=f"use layers 0 to {num_layers - 1}",
            )
        layers.update(range(first, last + 1))
    return frozenset(layers)
