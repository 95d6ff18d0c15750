"""Golden schedules: one line a case.

The order of forwards is the same on every rank, and so is that of backwards (asserted on writing), so a case is those
two orders, as `chunk.micro_batch`, and for each rank the letters F and B in the order they run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "data" / "schedules"
Order = list[tuple[str, int, int]]
"""(F or B, chunk, micro-batch) of one rank."""


def compact(ranks: list[Order]) -> dict[str, object]:
    def only(op: str, order: Order) -> str:
        return " ".join(f"{chunk}.{micro_batch}" for kind, chunk, micro_batch in order if kind == op)

    assert len({(only("F", order), only("B", order)) for order in ranks}) == 1
    return {
        "forwards": only("F", ranks[0]),
        "backwards": only("B", ranks[0]),
        "ranks": ["".join(op for op, _, _ in order) for order in ranks],
    }


def expand(case: dict[str, object]) -> list[Order]:
    """The orders of every rank of a case."""
    ranks = []
    for letters in case["ranks"]:
        sequences = {"F": iter(case["forwards"].split()), "B": iter(case["backwards"].split())}
        order = [(letter, *map(int, next(sequences[letter]).split("."))) for letter in letters]
        ranks.append(order)
    return ranks


def read(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def write(target: Path, cases: Iterable[dict[str, object]]) -> None:
    lines = [json.dumps(case, separators=(",", ":")) for case in cases]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {len(lines)} cases to {target.name}")
