"""The cases that `ranks.py` runs, by how many processes they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tests.runtime.models import SEQ, alone, batch, hugging_face, reference
from torch import distributed
from torch.distributed.tensor import DTensor

from evenload.errors import EvenloadError
from evenload.ledger.curve import peaks as peaks_of
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.record.recorder import record
from evenload.runtime.materials import Materials
from evenload.runtime.memory import step_peaks
from evenload.runtime.optimizer import clip_gradients, make_optimizer
from evenload.runtime.pipeline import assemble, examined, made, next_token_loss, parallelize, whole
from evenload.runtime.placement import places
from evenload.runtime.ranks import device_mesh, find_ranks
from evenload.runtime.rehearse import rehearse_rank
from evenload.runtime.settings import RunSettings
from evenload.runtime.stages import make_chunk
from evenload.runtime.step import train_step
from evenload.setup import Setup

CASES: dict[int, dict[str, Callable[[], Any]]] = {2: {}, 4: {}}

MIXED = Policy(
    full=frozenset({1, 5, 9}),
    select={r"mlp\.mul": frozenset({0, 2, 6}), r"mlp\.act_fn\.silu": frozenset({0, 2, 6}), ".*norm": frozenset({3})},
)
"""Some layers whole, some operators of others, and some not at all."""
EXACT = {
    2: {
        "1f1b": ([6, 5], [8, 3], [3, 8]),
        "gpipe": ([5, 6],),
        "interleaved_1f1b": ([[3, 3], [3, 2]], [[1, 4], [5, 1]], [[2, 2], [2, 2], [2, 1]], [[6, 0], [3, 2]]),
        "interleaved_zero_bubble": ([[3, 3], [3, 2]], [[4, 2], [1, 4]]),
        "zbv": ([[3, 3], [3, 2]], [[2, 4], [4, 1]]),
        "dualpipe_v": ([[3, 3], [3, 2]],),
    },
    4: {
        "1f1b": ([3, 3, 3, 2], [5, 1, 1, 4]),
        "interleaved_1f1b": ([[2, 2, 1, 1], [2, 1, 1, 1]], [[1, 1, 1, 1], [1, 2, 1, 3]]),
        "zbv": ([[2, 2, 1, 1], [2, 1, 1, 1]],),
        "dualpipe_v": ([[2, 2, 1, 1], [2, 1, 1, 1]],),
    },
}
"""World -> schedule -> layouts of 11 layers for which gradients are those of one process to the bit."""


def plan_of(table: Any, schedule: str, micro_batches: int, policy: Policy = MIXED) -> Plan:
    layout = Layout.from_counts(table)
    setup = Setup(
        pp=layout.pp,
        interleave=layout.interleave,
        micro_batch=2,
        micro_batches=micro_batches,
        seq=SEQ,
        dtype="fp32",
        schedule=schedule,
    )
    return Plan(setup=setup, layout=layout, policy=policy)


def compare(make: Callable[[], Any], plan: Plan, steps: int = 2) -> dict[str, Any]:
    """Steps under a plan, beside the same step of one process."""
    micro_batches = plan.setup.micro_batches
    tokens, target = batch(micro_batches)
    model = make()
    loss, gradients = alone(model, tokens, target, micro_batches)
    pipeline, stages = parallelize(model, plan)
    differ, losses = {}, []
    for _ in range(steps):
        for parameter in pipeline.parameters():
            parameter.grad = None
        losses.append(pipeline.share(pipeline.step(tokens, target)))
        for name, parameter in pipeline.named_parameters().items():
            if parameter.grad is None or not torch.equal(parameter.grad, gradients[name]):
                far = None if parameter.grad is None else float((parameter.grad - gradients[name]).abs().max())
                differ[name] = far
    pipeline.remove()
    return {
        "loss": [torch.equal(one, loss) for one in losses],
        "differ": differ,
        "names": sorted(pipeline.named_parameters()),
        "all": sorted(gradients),
        "stages": [stage.stage_index for stage in stages],
    }


def add(world: int, name: str, run: Callable[[], Any]) -> None:
    CASES[world][name] = run


for world, by_schedule in EXACT.items():
    for schedule, tables in by_schedule.items():
        for table in tables:
            add(world, f"{schedule} {table}", partial(compare, reference, plan_of(table, schedule, 2 * world)))
add(2, "looped_bfs", partial(compare, reference, plan_of([[3, 3], [3, 2]], "looped_bfs", 4)))
for place, table, schedule in (("at two ranks", [6, 5], "1f1b"), ("at one rank", [[3, 3], [3, 2]], "zbv")):
    add(2, f"tied {place}", partial(compare, partial(reference, tie_word_embeddings=True), plan_of(table, schedule, 4)))
add(2, "hugging face", partial(compare, hugging_face, plan_of([[3, 3], [3, 2]], "interleaved_1f1b", 4)))


def beginnings(table: Any, schedule: str, **config: Any) -> dict[str, torch.Tensor]:
    """First values of this rank's parameters, of a model that is never whole."""
    pipeline, _ = parallelize(partial(reference, **config), plan_of(table, schedule, 4), seed=7)
    return {name: parameter.detach().clone() for name, parameter in pipeline.named_parameters().items()}


add(2, "begins [6, 5]", partial(beginnings, [6, 5], "1f1b"))
add(2, "begins in a v", partial(beginnings, [[1, 4], [5, 1]], "zbv"))
add(2, "begins tied", partial(beginnings, [6, 5], "1f1b", tie_word_embeddings=True))


def refusal(plan: Plan, make: Callable[[], Any] = reference) -> str:
    try:
        parallelize(make, plan)
    except EvenloadError as error:
        return str(error)
    return "accepted"


add(2, "too few processes", partial(refusal, plan_of([3, 3, 3, 2], "1f1b", 4)))
add(2, "another model", partial(refusal, plan_of([6, 6], "1f1b", 4, Policy())))
add(2, "too few micro-batches", partial(refusal, plan_of([6, 5], "1f1b", 1)))


def peaks(plan: Plan, accumulation: int = 1, degrees: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Peaks of this rank's steps: rehearsed before they run, and recorded when they do."""
    plan = replace(plan, setup=replace(plan.setup, **(degrees or {})))
    settings = RunSettings(accumulation=accumulation, clip=1.0)
    make = partial(reference, **changes)
    model = made(make)
    anatomy = examined(model, plan, None, None, None)
    ledger = rehearse_rank(model, anatomy, plan, settings, loss=next_token_loss)
    mesh = device_mesh(plan) if degrees else None
    pipeline, _ = parallelize(make, plan, mesh, accumulation=accumulation)
    optimizer = make_optimizer(pipeline.parameters(), settings)

    def tokens(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = batch(plan.setup.micro_batches)
        return one.clone(), other.clone()

    with record(model=torch.nn.ModuleList(pipeline.chunks), optimizer=optimizer) as recording:
        recording.core.steps.told = True
        for number in range(3):
            train_step(pipeline, optimizer, settings, tokens, number)
            recording.step()
    pipeline.remove()
    return {"predicted": step_peaks(ledger)[:2], "measured": step_peaks(recording.ledger)[:3]}


for schedule, table in (
    ("gpipe", [6, 5]),
    ("1f1b", [4, 7]),
    ("interleaved_1f1b", [[3, 3], [3, 2]]),
    ("interleaved_zero_bubble", [[3, 3], [3, 2]]),
    ("zbv", [[2, 4], [4, 1]]),
    ("dualpipe_v", [[3, 3], [3, 2]]),
):
    add(2, f"peaks {schedule}", partial(peaks, plan_of(table, schedule, 4)))
add(2, "peaks accumulated", partial(peaks, plan_of([6, 5], "1f1b", 4, Policy()), accumulation=2))
add(2, "peaks tied", partial(peaks, plan_of([6, 5], "1f1b", 4, Policy()), tie_word_embeddings=True, vocab_size=9000))

SMALL = Policy(full=frozenset({1}), select={r"mlp\.mul": frozenset({0, 2})})


def divided(
    make: Callable[[], Any], table: Any, schedule: str, policy: Policy = SMALL, **degrees: Any
) -> dict[str, Any]:
    """Steps of a pipeline whose stages are divided, beside those of one process that has all the data."""
    plan = plan_of(table, schedule, 4, policy)
    plan = replace(plan, setup=replace(plan.setup, **degrees))
    micro_batches = plan.setup.micro_batches * plan.setup.dp
    tokens, target = batch(micro_batches)
    loss, gradients = alone(make(), tokens, target, micro_batches)
    pipeline, _ = parallelize(make(), plan, device_mesh(plan))
    own = slice(pipeline.ranks.replica * 8, pipeline.ranks.replica * 8 + 8)
    losses, far = [], []
    for _ in range(2):
        for parameter in pipeline.parameters():
            parameter.grad = None
        mean = pipeline.share(pipeline.step(tokens[own], target[own]))
        distributed.all_reduce(mean)
        losses.append(float(mean / distributed.get_world_size() - loss))
        far.append(
            max(
                float((whole(parameter.grad) - gradients[name]).abs().max() / gradients[name].abs().max())
                for name, parameter in pipeline.named_parameters().items()
            )
        )
    norm = clip_gradients(pipeline, None)
    total = torch.nn.utils.get_total_norm({id(one): one for one in gradients.values()}.values())
    pipeline.remove()
    return {
        "loss": max(map(abs, losses)),
        "gradients": max(far),
        "norm": float(norm / total),
        "held": sum(_local(one).numel() for one in pipeline.parameters()),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


small = partial(reference, 5)
tied = partial(reference, 5, tie_word_embeddings=True)
DIVIDED: dict[str, Callable[[], Any]] = {
    "tp": partial(divided, small, [2, 3], "1f1b", tp=2),
    "tp with sequences": partial(divided, small, [2, 3], "gpipe", tp=2, sequence_parallel=True),
    "tp of hugging face": partial(
        divided, partial(hugging_face, layers=5), [[1, 1], [2, 1]], "interleaved_1f1b", tp=2, sequence_parallel=True
    ),
    "tp in a v": partial(divided, small, [[1, 1], [2, 1]], "zbv", tp=2),
    "tp with norms that are recomputed": partial(
        divided,
        small,
        [1, 4],
        "1f1b",
        Policy(select={".*norm": frozenset(range(5))}),
        tp=2,
        sequence_parallel=True,
    ),
    "tp tied": partial(divided, tied, [2, 3], "1f1b", tp=2),
    "fsdp": partial(divided, small, [2, 3], "1f1b", dp=2, zero=3),
    "fsdp interleaved": partial(divided, small, [[1, 1], [2, 1]], "interleaved_1f1b", dp=2, zero=2),
    "fsdp without bubbles": partial(divided, small, [[1, 1], [2, 1]], "interleaved_zero_bubble", dp=2, zero=2),
    "fsdp of hugging face": partial(divided, partial(hugging_face, layers=5), [2, 3], "1f1b", dp=2, zero=3),
    "fsdp tied": partial(divided, tied, [2, 3], "1f1b", dp=2, zero=3),
}
for name, run in DIVIDED.items():
    add(4, name, run)
DIVIDED_PEAKS: dict[int, dict[str, tuple[Any, str, dict[str, Any]]]] = {
    2: {
        "tp": ([5], "1f1b", {"tp": 2}),
        "tp with sequences": ([5], "1f1b", {"tp": 2, "sequence_parallel": True}),
        "ddp": ([5], "1f1b", {"dp": 2}),
        "fsdp 2": ([5], "1f1b", {"dp": 2, "zero": 2}),
        "fsdp 3": ([5], "1f1b", {"dp": 2, "zero": 3}),
    },
    4: {
        "pp tp": ([2, 3], "1f1b", {"tp": 2}),
        "pp tp with sequences": ([[1, 1], [2, 1]], "interleaved_1f1b", {"tp": 2, "sequence_parallel": True}),
        "pp tp in a v": ([[1, 1], [2, 1]], "zbv", {"tp": 2}),
        "pp fsdp 2": ([[1, 1], [2, 1]], "interleaved_1f1b", {"dp": 2, "zero": 2}),
        "pp fsdp 3": ([2, 3], "1f1b", {"dp": 2, "zero": 3}),
        "pp fsdp without bubbles": ([[1, 1], [2, 1]], "interleaved_zero_bubble", {"dp": 2, "zero": 3}),
        "tp fsdp": ([5], "1f1b", {"tp": 2, "dp": 2, "zero": 3}),
    },
}
"""World -> case -> layout of 5 layers, schedule, degrees."""
for world, chosen in DIVIDED_PEAKS.items():
    for name, (table, schedule, degrees) in chosen.items():
        add(world, f"peaks {name}", partial(peaks, plan_of(table, schedule, 4, SMALL), degrees=degrees, layers=5))


def start(table: Any, schedule: str, **degrees: Any) -> dict[str, Any]:
    """First values of divided chunks of a model that is never whole, and the most that this rank held meanwhile."""
    plan = plan_of(table, schedule, 4, SMALL)
    plan = replace(plan, setup=replace(plan.setup, **degrees))
    model = made(partial(reference, 5, vocab_size=4096))
    anatomy = examined(model, plan, None, None, None)
    ranks = find_ranks(plan, device_mesh(plan), None)
    with record() as recording:
        materials = Materials(model, ranks.device, seed=7, init=None)
        pipeline = assemble(materials, anatomy, plan, ranks, loss=next_token_loss, autocast=None, share=4)
    alone = Materials(model, ranks.device, seed=7, init=None)
    (place,) = places(Layout.even(5, pp=1))
    chunk = make_chunk(alone, place, anatomy)
    alone.fill(chunk.model, chunk.full_names)
    expected = dict(chunk.model.named_parameters())
    own = pipeline.named_parameters()
    return {
        "differ": [name for name, one in own.items() if not torch.equal(whole(one), expected[name])],
        "held": sum(_local(one).nbytes for one in own.values()),
        "peak": peaks_of(recording.ledger).held,
        "largest": max(one.nbytes for one in expected.values()),
    }


STARTS: dict[str, Callable[[], Any]] = {
    "tp and fsdp": partial(start, [5], "1f1b", tp=2, dp=2, zero=3),
    "stages and tp": partial(start, [2, 3], "1f1b", tp=2, sequence_parallel=True),
    "stages and fsdp": partial(start, [[1, 1], [2, 1]], "zbv", dp=2, zero=2),
}
for name, run in STARTS.items():
    add(4, f"starts {name}", run)


def refused_division(make: Callable[[], Any], table: Any, schedule: str, **degrees: Any) -> str:
    plan = plan_of(table, schedule, 4, SMALL)
    plan = replace(plan, setup=replace(plan.setup, **degrees))
    try:
        parallelize(make, plan, device_mesh(plan))
    except EvenloadError as error:
        return str(error)
    return "accepted"


add(4, "uneven vocabulary", partial(refused_division, partial(reference, 5, vocab_size=97), [2, 3], "1f1b", tp=2))
add(4, "tied at one rank", partial(refused_division, tied, [[1, 1], [2, 1]], "zbv", tp=2))
add(4, "zero 1", partial(refused_division, small, [2, 3], "1f1b", dp=2, zero=1))
