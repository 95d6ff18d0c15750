"""How fast a plan is simulated: `python benchmarks/simulate.py [--json]`.

One plan: layer costs added up, every action timed, bubble split, peak of every rank. Batched: step times of many plans
on one schedule's graph, as a planner asks for them. The graph of a schedule is made once and shared by its plans.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute
from evenload.profile.given import read_layer_table
from evenload.setup import Setup
from evenload.simulate.graph import ActionGraph
from evenload.simulate.timeline import simulate

SIZES = ((4, 1, 8), (8, 2, 32), (16, 1, 16), (16, 3, 64), (32, 2, 128))
PLANS = 2048
TABLE = {
    "head": {"time": 30, "mem_par": 11000},
    "body": {"count": 192, "time_fwd": 180, "mem_par": 1583, "mem_act": 826, "mem_full_recompute": 32},
    "tail": {"time": 90, "mem_par": 2473},
}


def best(function: Callable[[], object], seconds: float = 1.0) -> float:
    """Shortest time of a call."""
    function()
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def measure(pp: int, interleave: int, micro_batches: int) -> dict[str, object]:
    """One row of the table."""
    profile = read_layer_table(TABLE).profile
    layers = len(profile.blocks)
    schedule = "1f1b" if interleave == 1 else "interleaved_1f1b"
    plan = Plan(
        setup=Setup(pp=pp, interleave=interleave, micro_batches=micro_batches, schedule=schedule),
        layout=Layout.even(layers, pp=pp, interleave=interleave),
        policy=Policy.of_choices([Recompute.FULL if layer % 3 else Recompute.NONE for layer in range(layers)]),
    )
    size = {"pp": pp, "interleave": interleave, "micro_batches": micro_batches}
    forward = np.random.default_rng(0).random((PLANS, interleave, pp))
    graph = ActionGraph.scheduled(schedule, **size)
    return {
        **size,
        "actions": 2 * pp * interleave * micro_batches,
        "graph_ms": 1e3 * best(lambda: ActionGraph.of(graph.actions).step_times(forward[0], forward[0])),
        "one_plan_ms": 1e3 * best(lambda: simulate(profile, plan)),
        "plans_per_second": PLANS / best(lambda: graph.step_times(forward, 2 * forward)),
    }


def main() -> None:
    """Print the table, or the same as JSON."""
    rows = [measure(*size) for size in SIZES]
    if "--json" in sys.argv[1:]:
        print(json.dumps(rows, indent=2))
        return
    print(f"{os.cpu_count()} cores, numpy {np.__version__}, {PLANS} plans a batch")
    print("pp  interleave  micro-batches  actions  graph (ms)  one plan (ms)  batched (plans/s)")
    for row in rows:
        print("{pp:2d}  {interleave:10d}  {micro_batches:13d}  {actions:7d}".format(**row), end="  ")
        print("{graph_ms:10.1f}  {one_plan_ms:13.2f}  {plans_per_second:17,.0f}".format(**row))


if __name__ == "__main__":
    main()
