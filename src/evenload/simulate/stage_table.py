"""Costs that are known by stage rather than by layer, read from a JSON or YAML file.

    {"forward": [[3, 3], [3, 4]], "recompute": [[0, 1], [0, 0]], "kept": [[2, 2], [2, 2]], "static": [20, 30],
     "constant": 7, "micro_batches": 4, "schedule": "interleaved_1f1b", "memory_unit": "MB", "time_unit": "ms"}

Times and memory are [chunk][stage], or [stage] for one chunk. Only `forward` is needed; backward is twice forward plus
`recompute` unless `backward` says otherwise. The names of MindSpore's pipeline simulator (`bt`, `lr`, `bm`, `bp`, `cm`,
`m`, `method`) are understood too, alone or under `input`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from evenload.errors import EvenloadError, did_you_mean
from evenload.profile.numbers import as_number, count, entry, listed, number
from evenload.simulate.costs import ChunkCosts

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "forward": ("forward", "bt"),
    "backward": ("backward",),
    "recompute": ("recompute", "lr"),
    "kept": ("kept", "bm"),
    "static": ("static", "bp"),
    "constant": ("constant", "cm"),
    "transfer": ("transfer",),
    "micro_batches": ("micro_batches", "m"),
    "schedule": ("schedule", "method"),
    "memory_unit": ("memory_unit",),
    "time_unit": ("time_unit",),
}
_IGNORED: Final = {"comm"}
"""Keys of MindSpore's simulator without a number: its communication model is not evenload's, see `transfer`."""


@dataclass(frozen=True, kw_only=True)
class StageTable:
    """A table as it was read."""

    costs: ChunkCosts
    micro_batches: int | None
    schedule: str | None
    transfer: float = 0.0
    memory_unit: str = "units"
    time_unit: str = "units"


def is_stage_table(data: object) -> bool:
    """Whether parsed data is such a table, and not a table of layers."""
    if not isinstance(data, Mapping):
        return False
    inner = _inner(entry(cast("object", data), "$"))
    return isinstance(inner, Mapping) and any(name in inner for name in _NAMES["forward"])


def read_stage_table(data: object, where: str | None = None) -> StageTable:
    """Read a table from parsed JSON or YAML.

    Args:
        data: the parsed file; it is not changed.
        where: name of the file, put before the `$.path` of an error.

    Raises:
        EvenloadError: with the path of the value that is missing, unknown, negative, or of the wrong shape.
    """
    try:
        return _read(data)
    except EvenloadError as error:
        if where is None:
            raise
        raise error.at(f"{where}: {error.where or '$'}") from None


def _read(data: object) -> StageTable:
    outer = entry(data, "$")
    path = "$.input" if "input" in outer else "$"
    table = entry(_inner(outer), path)
    _check_keys(table, path)
    forward = _grid(table, "forward", path)
    if forward is None:
        raise EvenloadError("'forward' is missing", where=path, fix="add the forward time of every stage")
    tables = {
        name: grid for name in ("backward", "recompute", "kept") if (grid := _grid(table, name, path)) is not None
    }
    for name, grid in tables.items():
        if grid.shape != forward.shape:
            key = _key(table, name)
            raise EvenloadError(
                f"{key} is {_size(grid)}, {_key(table, 'forward')} is {_size(forward)}",
                where=f"{path}.{key}",
                fix="give one number for each chunk of each stage",
            )
    micro_batches = count(table, _NAMES["micro_batches"], path, default=0)
    return StageTable(
        costs=ChunkCosts.of_tables(
            forward,
            **tables,
            static=_static(table, forward.shape[1], path),
            constant=number(table, _NAMES["constant"], path, default=0.0),
        ),
        micro_batches=micro_batches or None,
        schedule=_schedule(table),
        transfer=number(table, _NAMES["transfer"], path, default=0.0),
        memory_unit=str(table.get("memory_unit", "units")),
        time_unit=str(table.get("time_unit", "units")),
    )


def _inner(outer: dict[str, Any]) -> Any:
    """The table itself, which may stand under `input`."""
    return outer.get("input", outer)


def _check_keys(table: Mapping[str, Any], path: str) -> None:
    known = [name for names in _NAMES.values() for name in names]
    for key in table:
        if key not in known and key not in _IGNORED:
            fix = did_you_mean(key, known) or f"known keys are {', '.join(_NAMES)}"
            raise EvenloadError(f"unknown key {key!r}", where=f"{path}.{key}", fix=fix)


def _grid(table: Mapping[str, Any], name: str, path: str) -> NDArray[np.float64] | None:
    """A table of [chunk][stage]; a single row may be written without the outer brackets."""
    key = _key(table, name)
    if key is None:
        return None
    at = f"{path}.{key}"
    rows = listed(table[key], at)
    if not any(isinstance(row, list) for row in rows):
        rows, nested = [rows], False
    else:
        nested = True
    grid = [_row(row, key, f"{at}[{index}]" if nested else at) for index, row in enumerate(rows)]
    if not grid[0] or any(len(row) != len(grid[0]) for row in grid):
        raise EvenloadError(
            f"the rows of {key} have {', '.join(str(len(row)) for row in grid)} stages",
            where=at,
            fix="give every chunk one number a stage",
        )
    return np.array(grid)


def _key(table: Mapping[str, Any], name: str) -> str | None:
    """Which of its names the table uses for something."""
    return next((key for key in _NAMES[name] if table.get(key) is not None), None)


def _row(row: object, key: str, path: str) -> list[float]:
    name = f"an entry of {key}"
    return [as_number(value, name, f"{path}[{index}]") for index, value in enumerate(listed(row, path))]


def _static(table: Mapping[str, Any], stages: int, path: str) -> NDArray[np.float64]:
    grid = _grid(table, "static", path)
    if grid is None:
        return np.zeros(stages)
    if grid.shape[1] != stages or (grid != grid[0]).any():
        raise EvenloadError(
            f"{_key(table, 'static')} is {_size(grid)} and must be one number a stage, for {stages} stages",
            where=f"{path}.{_key(table, 'static')}",
            fix="give what each stage holds for all its chunks together",
        )
    return np.array(grid[0], dtype=np.float64)


def _schedule(table: Mapping[str, Any]) -> str | None:
    key = _key(table, "schedule")
    return None if key is None else str(table[key])


def _size(grid: NDArray[np.float64]) -> str:
    return f"{grid.shape[0]} chunks x {grid.shape[1]} stages"
