"""What `evenload check` answers: the normalized tables, what each layer does, the warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from evenload.dialects.reading import Reading, Tables
from evenload.errors import Notice
from evenload.plan.layout import Table
from evenload.plan.policy import LayerPolicy
from evenload.report.table import columns
from evenload.units import gib, plural


def check_json(reading: Reading) -> dict[str, Any]:
    """The answer as plain values. Patterns are spelled as the file spells them."""
    layout = reading.plan.layout
    tables = reading.tables or Tables.of(reading.plan)
    return {
        "dialect": reading.dialect,
        "num_layers": layout.num_layers,
        "layers_per_stage": layout.table,
        "accumulated": layout.accumulated,
        "pipeline_ids": layout.stages_of_layers(),
        "interleave_ids": layout.chunks_of_layers(),
        "full": tables.full,
        "select": _spelled(reading, tables.select),
        "select_comm": _spelled(reading, tables.comm),
        "per_layer": [
            {
                "layer": layer,
                "stage": stage,
                "chunk": chunk,
                "full": policy.full,
                "select": [reading.written.get(pattern, pattern) for pattern in policy.select],
                "comm": [reading.written.get(pattern, pattern) for pattern in policy.comm],
            }
            for layer, stage, chunk, policy in _layers(reading)
        ],
        "limit": reading.limit,
        "warnings": [{"fact": notice.fact, "where": notice.where, "fix": notice.fix} for notice in reading.notices],
    }


def check_text(reading: Reading, *, verbose: bool = False) -> str:
    """The answer as text.

    Args:
        reading: the file.
        verbose: one row for every layer instead of one for every run of layers that do the same; setup and limit too.
    """
    parts = [*reading.log] if reading.log else []
    parts += ["", _stages(reading), "", _what_layers_do(reading, verbose=verbose)]
    if verbose:
        parts += ["", _setup(reading)]
    if reading.limit is not None:
        parts += ["", f"device memory: {gib(reading.limit)}"]
    parts += ["", _warnings(reading.notices)]
    return "\n".join(parts).lstrip("\n")


def _stages(reading: Reading) -> str:
    """Layers and fully recomputed layers of every stage, one column a stage."""
    layout = reading.plan.layout
    tables = reading.tables or Tables.of(reading.plan)
    header = ["", *(f"stage {stage}" for stage in range(layout.pp)), "all"]
    rows: list[Sequence[str]] = []
    for name, counted in (("layers", layout.table), ("full recompute", tables.full)):
        rows += _rows(name, counted)
    for kind, patterns in (("select", tables.select), ("comm", tables.comm)):
        for pattern, counted in _spelled(reading, patterns).items():
            if any(map(any, counted)):
                rows += _rows(f"{kind} {pattern}", counted)
    return "Layers of every stage\n" + columns(header, rows, left={0})


def _rows(name: str, counted: Table) -> list[Sequence[str]]:
    several = len(counted) > 1
    rows = [(f"{name}, chunk {chunk}" if several else name, row) for chunk, row in enumerate(counted)]
    if several and name == "layers":
        rows.append(("layers, all chunks", tuple(map(sum, zip(*counted, strict=True)))))
    return [(label, *map(str, row), str(sum(row))) for label, row in rows]


def _what_layers_do(reading: Reading, *, verbose: bool) -> str:
    """One row for a run of layers that do the same, or one for every layer."""
    rows: list[Sequence[str]] = []
    for _, run in groupby(_layers(reading), key=lambda entry: entry if verbose else entry[1:]):
        entries = list(run)
        first, stage, chunk, policy = entries[0]
        last = entries[-1][0]
        numbers = str(first) if first == last else f"{first}-{last}"
        rows.append((numbers, str(stage), str(chunk), *_words(reading, policy)))
    head = ("layers", "stage", "chunk", "recompute", "operators", "communication")
    return "What each layer does\n" + columns(head, rows, left={3, 4, 5})


def _words(reading: Reading, policy: LayerPolicy) -> tuple[str, str, str]:
    def spell(patterns: tuple[str, ...], excluded: tuple[str, ...]) -> str:
        named = ", ".join(reading.written.get(pattern, pattern) for pattern in patterns)
        return f"{named} except {', '.join(excluded)}" if named and excluded else named

    if policy.full:
        return "full", spell(("all",), policy.select_exclude), ""
    return (
        policy.choice.value,
        spell(policy.select, policy.select_exclude),
        spell(policy.comm, policy.comm_exclude),
    )


def _setup(reading: Reading) -> str:
    setup = reading.plan.setup
    shown = {
        name: getattr(setup, name) for name in ("tp", "cp", "dp", "ep", "zero", "micro_batch", "micro_batches", "seq")
    }
    values = [f"{name} {value}" for name, value in shown.items()]
    return f"setup: pp {setup.pp}, {', '.join(values)}, {setup.dtype}, schedule {setup.schedule}"


def _warnings(notices: Sequence[Notice]) -> str:
    if not notices:
        return "no warnings"
    return "\n".join([f"{plural(len(notices), 'warning')}:", *(f"warning: {notice}" for notice in notices)])


def _layers(reading: Reading) -> list[tuple[int, int, int, LayerPolicy]]:
    """(layer, stage, chunk, what is recomputed on it) of every layer."""
    plan = reading.plan
    stages, chunks = plan.layout.stages_of_layers(), plan.layout.chunks_of_layers()
    return [(layer, stages[layer], chunks[layer], plan.for_layer(layer)) for layer in range(plan.layout.num_layers)]


def _spelled(reading: Reading, patterns: Mapping[str, Table]) -> dict[str, Table]:
    return {reading.written.get(pattern, pattern): counted for pattern, counted in patterns.items()}
