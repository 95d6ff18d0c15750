"""Dry runs of several ranks of one plan: a line for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from evenload.ledger.words import Category
from evenload.report.dryrun import DryRun, at_peak, phase
from evenload.report.dryrun import as_json as of_rank
from evenload.report.table import columns
from evenload.units import GIB, MIB, human_bytes

_COLUMNS: Final = (
    ("parameters", Category.PARAMETER),
    ("gradients", Category.GRADIENT),
    ("optimizer", Category.OPTIMIZER),
    ("activations", Category.ACTIVATION),
    ("communication", Category.COMMUNICATION),
    ("temporary", Category.TEMPORARY),
)


def as_json(runs: Sequence[DryRun]) -> dict[str, Any]:
    """The numbers under the names of `evenload dryrun --json`; `ranks` has one entry a rank, as for one alone."""
    first = runs[0]
    answer: dict[str, Any] = {
        "target": first.title,
        "device": first.ledger.device,
        "world": first.ledger.metadata.world,
        "peak": max(run.peaks.held for run in runs),
        "ranks": [of_rank(run) for run in runs],
        "seconds": sum(run.seconds for run in runs),
    }
    if first.limit is not None:
        answer |= {"limit": first.limit, "fits": all(run.fits for run in runs)}
    return answer


def as_text(runs: Sequence[DryRun]) -> str:
    """The table for the terminal: what is there at the peak of each rank."""
    first = runs[0]
    head = ["stage", "rank", "peak", "in", *(name for name, _ in _COLUMNS)]
    rows: list[list[str]] = []
    unit, size = ("GiB", GIB) if max(run.peaks.held for run in runs) >= GIB else ("MiB", MIB)
    for stage, run in enumerate(runs):
        found = at_peak(run)
        sizes = [f"{found.get(category, 0) / size:.2f}" for _, category in _COLUMNS]
        peak = f"{run.peaks.held / size:.2f}"
        rows.append([str(stage), str(run.ledger.metadata.rank), peak, phase(run), *sizes])
    fullest = max(range(len(runs)), key=lambda stage: runs[stage].peaks.held)
    peak = human_bytes(runs[fullest].peaks.held)
    seconds = sum(run.seconds for run in runs)
    world = first.ledger.metadata.world
    said = f"the first rank of each stage of {world} ranks: {seconds:.1f} s, without the devices"
    parts = [
        f"{first.title}\ndry run for {first.ledger.device}, {said}",
        columns(head, rows, left={3}),
        f"{unit} = 2**{30 if size == GIB else 20} bytes, at the peak of each rank; --rank shows one of them whole",
    ]
    if first.limit is None:
        parts.append(f"stage {fullest} needs most: {peak}")
    else:
        word = "fits in" if all(run.fits for run in runs) else "does not fit in"
        parts.append(f"{word} {human_bytes(first.limit)}: stage {fullest} needs most, {peak}")
    return "\n\n".join(parts)
