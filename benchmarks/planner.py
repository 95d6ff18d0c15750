"""Plans for recorded problems beside the best known, SAPP's answers and even layers, all timed by one simulator.

    python benchmarks/planner.py [--effort normal] [--json]

Every problem is the layer table, limit and schedule of a published SAPP case or of a case made for it (see
`tests/data/planner/instances.json`); "SAPP" is the quickest of its recorded answers, with a star where it needs more
memory than the limit. Step times are in the units of the tables. Seconds are processor time of this process, which runs
on one core: the wall time of an idle machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

from evenload.planner.solve import solve
from evenload.profile.given import read_layer_table
from evenload.setup import Setup

INSTANCES = Path(__file__).parent.parent / "tests" / "data" / "planner" / "instances.json"


def row(instance: dict, effort: str) -> dict:
    """One line of the table."""
    setup = Setup(**{key: instance[key] for key in ("pp", "interleave", "micro_batches", "schedule")})
    begin = time.process_time()
    result = solve(read_layer_table(instance).profile, setup, float(instance["memory"]), effort=effort)
    seconds = time.process_time() - begin
    least = result.baselines["even_least"]
    recorded = min(instance["recorded"].values(), key=lambda answer: answer["step_time"])
    return {
        "instance": instance["id"],
        "evenload": result.step_time,
        "bound": result.bound,
        "gap": result.gap,
        "best_known": instance["best_known"],
        "sapp": recorded["step_time"],
        "sapp_fits": recorded["peak"] <= instance["memory"],
        "even_least": least.step_time if least.fits else None,
        "peak": max(result.peaks),
        "limit": result.limit,
        "seconds": seconds,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [row(instance, arguments.effort) for instance in json.loads(INSTANCES.read_text())]
    if arguments.json:
        json.dump(rows, sys.stdout, indent=1)
        return

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:,.1f}"

    print("| instance | evenload | best known before | SAPP | even + least recompute | lower bound | gap | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for entry in rows:
        numbers = [shown(entry[key]) for key in ("evenload", "best_known", "sapp", "even_least", "bound")]
        numbers[2] += "" if entry["sapp_fits"] else " *"
        print(f"| {entry['instance']} | {' | '.join(numbers)} | {entry['gap']:.2%} | {entry['seconds']:.1f} |")
    print(
        f"\npeak resident memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
    )


if __name__ == "__main__":
    main()
