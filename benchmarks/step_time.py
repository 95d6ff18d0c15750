"""Predicted beside measured time of a step: the layers are measured, the schedule is simulated, then the plan runs.

    python benchmarks/step_time.py --repeats 3

Two gloo ranks with one thread each. Every repeat measures the layers anew, in both processes at once, and then runs
every row; what other programs do to the machine in the meantime is in the range that is shown. Steps are timed as
`evenload train` times them: the median of all but the first few.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import distributed

from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute
from evenload.runtime.optimizer import make_optimizer
from evenload.runtime.pace import FIRST, Pace, StepTime, predicted_step
from evenload.runtime.pipeline import parallelize
from evenload.runtime.profiling import profile_here
from evenload.runtime.settings import RunSettings
from evenload.runtime.step import train_step
from evenload.runtime.train import build
from evenload.setup import Setup

RANKS = 2
CONFIG = {
    "model_type": "reference",
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
}
SETUP = Setup(micro_batch=2, seq=128, dtype="fp32")
MICRO_BATCHES = 8
SETTINGS = RunSettings(implementation="reference", predict=False)
LAYOUTS = {
    "gpipe": ([4, 4],),
    "1f1b": ([4, 4],),
    "1f1b, uneven": ([5, 3],),
    "interleaved_1f1b": ([2, 2], [2, 2]),
}
POLICIES = {"nothing": Recompute.NONE, "select": Recompute.SELECT, "full": Recompute.FULL}


def plans() -> dict[tuple[str, str], Plan]:
    """The plan of every row."""
    found: dict[tuple[str, str], Plan] = {}
    for name, rows in LAYOUTS.items():
        setup = Setup(
            pp=RANKS,
            interleave=len(rows),
            micro_batch=SETUP.micro_batch,
            micro_batches=MICRO_BATCHES,
            seq=SETUP.seq,
            dtype="fp32",
            schedule=name.partition(",")[0],
        )
        for policy, choice in POLICIES.items():
            if policy == "nothing" or name in {"1f1b", "interleaved_1f1b"}:
                layers = int(CONFIG["num_hidden_layers"])
                layout = Layout(tuple(map(tuple, rows)))
                found[name, policy] = Plan(setup=setup, layout=layout, policy=Policy.everywhere(choice, layers))
    return found


def run(plan: Plan, predicted: float, steps: int) -> StepTime:
    """Train for some steps."""
    pipeline, _ = parallelize(build(CONFIG, plan, "reference"), plan)
    optimizer = make_optimizer(pipeline.parameters(), SETTINGS)
    shape = (plan.setup.micro_batch * plan.setup.micro_batches, plan.setup.seq)
    tokens = torch.randint(0, int(CONFIG["vocab_size"]), shape)
    pace = Pace(predicted)
    for step in range(FIRST + steps):
        distributed.barrier()
        began = perf_counter()
        train_step(pipeline, optimizer, SETTINGS, lambda _: (tokens, tokens), step)
        distributed.barrier()
        pace.step(perf_counter() - began)
    pipeline.remove()
    return pace.found


def rank(number: int, folder: str, repeats: int, steps: int, rounds: int) -> None:
    """One process: all rows."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", rank=number, world_size=RANKS, store=store)
    found: dict[tuple[str, str], list[StepTime]] = {row: [] for row in plans()}
    for _ in range(repeats):
        measured = profile_here(CONFIG, "reference", SETUP, SETTINGS, rounds=rounds)
        for row, plan in plans().items():
            predicted = predicted_step(measured, plan, SETTINGS, own=False)
            found[row].append(run(plan, predicted, steps))
    if number == 0:
        print("| schedule | recomputed | predicted (ms) | measured | difference, median | of single repeats |")
        print("|---|---|---|---|---|---|")
        for row, times in found.items():
            print(line(*row, times))
    distributed.destroy_process_group()


def line(schedule: str, policy: str, times: list[StepTime]) -> str:
    """A line of the table."""
    predicted = median(one.predicted or 0.0 for one in times) * 1e3
    measured = median(one.measured or 0.0 for one in times) * 1e3
    errors = sorted(one.error or 0.0 for one in times)
    single = ", ".join(f"{error:+.0%}" for error in errors)
    return f"| `{schedule}` | {policy} | {predicted:.0f} | {measured:.0f} | {median(errors):+.1%} | {single} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = torch.multiprocessing
        processes.spawn(rank, (str(Path(folder)), asked.repeats, asked.steps, asked.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
