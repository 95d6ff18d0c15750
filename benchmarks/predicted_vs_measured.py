"""Predicted beside measured peaks of every rank, schedule by schedule: the table of `docs/accuracy.md`.

Each rank's step is rehearsed on fake tensors and the peak kept before the first step; then three steps run on gloo, and
the peak of the third is measured by the recorder. A second run is measured by PyTorch's profiler, which sees every
allocation of the rank's own thread, kernels' scratch included.

    python benchmarks/predicted_vs_measured.py            # 2 stages
    python benchmarks/predicted_vs_measured.py --stages 4
    python benchmarks/predicted_vs_measured.py --tp 2 --sequence-parallel
    python benchmarks/predicted_vs_measured.py --dp 2 --zero 3
    python benchmarks/predicted_vs_measured.py --stages 1 --dp 2 --zero 0 --schedules 1f1b
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.record.recorder import record
from evenload.runtime.memory import of_ledger, step_peaks
from evenload.runtime.optimizer import make_optimizer
from evenload.runtime.pipeline import Pipeline, examined, made, next_token_loss, parallelize
from evenload.runtime.ranks import device_mesh
from evenload.runtime.reference import ReferenceModel, read_sizes
from evenload.runtime.rehearse import rehearse_rank
from evenload.runtime.settings import RunSettings
from evenload.runtime.step import train_step
from evenload.setup import Setup

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SEQ, MICRO_BATCH = 64, 2
LAYOUTS = {
    1: ([[11]], [[6], [5]]),
    2: ([[7, 4]], [[3, 3], [3, 2]]),
    4: ([[3, 3, 3, 2]], [[2, 2, 1, 1], [2, 1, 1, 1]]),
}
"""Stages -> layers of one chunk a stage, and of two."""
ONE_CHUNK = ("gpipe", "1f1b")
SCHEDULES = (*ONE_CHUNK, "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v")
POLICIES = {
    "nothing": Policy(),
    "operators": Policy(select=dict.fromkeys((r"mlp\.mul", r"mlp\.act_fn\.silu", ".*norm"), frozenset(range(11)))),
    "layers": Policy(full=frozenset(range(11))),
    "a mixture": Policy(
        full=frozenset({1, 5, 9}), select={r"mlp\.mul": frozenset({0, 2, 6}), ".*norm": frozenset({3})}
    ),
}
SETTINGS = RunSettings()


def plan_of(degrees: dict[str, Any], schedule: str, policy: Policy) -> Plan:
    """The plan of one row."""
    table = LAYOUTS[degrees["pp"]][schedule not in ONE_CHUNK]
    setup = Setup(
        **degrees,
        interleave=len(table),
        micro_batch=MICRO_BATCH,
        micro_batches=2 * degrees["pp"],
        seq=SEQ,
        dtype="fp32",
        schedule=schedule,
    )
    return Plan(setup=setup, layout=Layout(tuple(map(tuple, table))), policy=policy)


def predict(plan: Plan, make: Any) -> int:
    """This rank's peak, rehearsed."""
    whole = made(make)
    anatomy = examined(whole, plan, None, None, None)
    ledger = rehearse_rank(whole, anatomy, plan, SETTINGS, loss=next_token_loss)
    return of_ledger(distributed.get_rank(), ledger).predicted or 0


def batch_of(plan: Plan) -> Any:
    """Tokens of a step."""
    shape = (plan.setup.micro_batch * plan.setup.micro_batches, plan.setup.seq)

    def batch(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, SIZES["vocab_size"], shape), torch.randint(0, SIZES["vocab_size"], shape)

    return batch


def build(plan: Plan, make: Any) -> tuple[Pipeline, torch.optim.Optimizer]:
    """This rank's part of a run."""
    divided = plan.setup.devices > plan.setup.pp
    pipeline, _ = parallelize(make, plan, device_mesh(plan) if divided else None)
    return pipeline, make_optimizer(pipeline.parameters(), SETTINGS)


def by_recorder(plan: Plan, make: Any) -> int:
    """Peak of the third step, by the ledger."""
    pipeline, optimizer = build(plan, make)
    batch = batch_of(plan)
    with record(model=nn.ModuleList(pipeline.chunks), optimizer=optimizer) as recording:
        recording.core.steps.told = True  # steps end where `step` says
        for step in range(3):
            train_step(pipeline, optimizer, SETTINGS, batch, step)
            recording.step()
    return step_peaks(recording.ledger)[2]


def by_profiler(plan: Plan, make: Any) -> int:
    """Highest point of three steps, by the profiler.

    It does not see what gloo's thread frees; that has ended at the latest when an address is given away again.
    """
    gc.collect()  # what is left of other runs would be freed inside the recording
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        pipeline, optimizer = build(plan, make)
        for step in range(3):
            train_step(pipeline, optimizer, SETTINGS, batch_of(plan), step)
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    noted: list[tuple[int, int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            noted.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    alive: dict[int, int] = {}
    level = peak = 0
    for _, address, nbytes in sorted(noted, key=lambda one: one[0]):
        level += max(nbytes, 0) - alive.pop(address, 0)
        if nbytes > 0:
            alive[address] = nbytes
        peak = max(peak, level)
    return peak


def rank(number: int, world: int, folder: str, degrees: dict[str, Any], schedules: list[str]) -> None:
    """One process: all rows."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", world)
    distributed.init_process_group("gloo", rank=number, world_size=world, store=store)
    make = partial(ReferenceModel, read_sizes(SIZES))
    for schedule in schedules:
        for policy, chosen in POLICIES.items():
            plan = plan_of(degrees, schedule, chosen)
            predicted = predict(plan, make)
            found: list[Any] = [None] * world
            distributed.all_gather_object(found, (predicted, by_recorder(plan, make), by_profiler(plan, make)))
            if number == 0:
                print(row(schedule, policy, found), flush=True)
    distributed.destroy_process_group()


def row(schedule: str, policy: str, found: list[tuple[int, int, int]]) -> str:
    """A line of the table."""
    kib = [tuple(round(one / 1024) for one in each) for each in found]
    predicted = ", ".join(f"{one[0]:,}" for one in kib)
    measured = ", ".join(f"{one[1]:,}" for one in kib)
    errors = [(one[1] - one[0]) / one[0] for one in found]
    worst = max(errors, key=abs)
    apart = max(abs(one[2] - one[0]) for one in found) / 1024
    exact = "none" if not any(errors) else f"{worst:+.2%}"
    return f"| `{schedule}` | {policy} | {predicted} | {measured} | {exact} | {apart:,.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, choices=sorted(LAYOUTS), default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--zero", type=int, choices=(0, 2, 3), default=3)
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    asked = parser.parse_args()
    degrees = {"pp": asked.stages, "tp": asked.tp, "sequence_parallel": asked.sequence_parallel}
    degrees |= {"dp": asked.dp, "zero": asked.zero} if asked.dp > 1 else {}
    world = asked.stages * asked.tp * asked.dp
    print("| schedule | recomputed | predicted (KiB, by rank) | measured | difference | profiler differs by (KiB) |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = torch.multiprocessing
        processes.spawn(rank, (world, str(Path(folder)), degrees, asked.schedules), nprocs=world)


if __name__ == "__main__":
    main()
