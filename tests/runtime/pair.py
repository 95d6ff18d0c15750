"""What two gloo processes do together; run by tests that look at the results.

All scenarios run in one pair of processes, because starting one takes seconds. Each returns plain values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.processes import run_all
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from evenload.ledger.log import encode
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute
from evenload.record.hugging_face import model_builder
from evenload.record.layers import find_layers, recompute_layers
from evenload.record.recorder import record
from evenload.record.training import Training, make_optimizer
from evenload.runtime.dryrun import divided, step
from evenload.runtime.parallel import apply_tensor_parallel
from evenload.runtime.parts import find_parts
from evenload.runtime.pipeline import parallelize
from evenload.runtime.profiling import profile_here
from evenload.runtime.settings import RunSettings
from evenload.runtime.sharding import DTYPES, apply_data_parallel
from evenload.runtime.world import make_mesh
from evenload.setup import Setup

RANKS = 2
SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite")
SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(run: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[run.__name__] = run
    return run


def main(rank: int, folder: str) -> None:
    run_all(rank, RANKS, folder, SCENARIOS)


def build(family: str = "llama", **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return model_builder({**SMALL, "model_type": family, **changes}, dtype=torch.float32)()


def tokens(rank: int = 0) -> torch.Tensor:
    return torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(rank))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}


def furthest(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Largest difference of gradients, next to the largest of each; parameters must be the same ones."""
    assert first.keys() == second.keys()
    return max(((first[n] - second[n]).abs().max() / first[n].abs().max().clamp_min(1e-9)).item() for n in first)


@scenario
def tensor_parallel() -> Any:
    """Loss and gradients next to those of one process, family by family."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found = {}
    for family in FAMILIES:
        tied = family.startswith("gemma")
        plain = build(family, tie_word_embeddings=tied)
        loss = plain(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        for sequence in (False, True):
            model = build(family, tie_word_embeddings=tied)
            apply_tensor_parallel(find_parts(model), mesh, sequence_parallel=sequence)
            with loss_parallel():
                divided = model(input_ids=tokens(), labels=tokens()).loss
                divided.backward()
            found[family, sequence] = {
                "loss": abs(whole(divided) - loss).item(),
                "gradients": furthest(gradients(plain), gradients(model)),
                "all": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
                "local": sum(parameter.to_local().numel() for parameter in model.parameters()),
                "whole": sum(parameter.numel() for parameter in plain.parameters()),
            }
    return found


@scenario
def data_parallel() -> Any:
    """Gradients next to those of one process over the batches of both."""
    mesh = init_device_mesh("cpu", (RANKS,))
    plain = build()
    sum(plain(input_ids=tokens(rank), labels=tokens(rank)).loss / RANKS for rank in range(RANKS)).backward()
    found = {}
    for zero in (0, 2, 3):
        model = build()
        setup = Setup(dp=RANKS, zero=zero, dtype="fp32")
        called = apply_data_parallel(model, find_parts(model), mesh, setup)
        mine = tokens(distributed.get_rank())
        called(input_ids=mine, labels=mine).loss.backward()
        found[zero] = furthest(gradients(plain), gradients(model))
    return found


RUNS = {
    "fsdp": Setup(dp=RANKS, zero=3, dtype="fp32", seq=16, micro_batch=2, micro_batches=2),
    "fsdp mixed": Setup(dp=RANKS, zero=3, dtype="bf16", master_weights=True, seq=16, micro_batch=2),
    "fsdp gathered": Setup(dp=RANKS, zero=2, dtype="fp32", seq=16, micro_batch=2),
    "tensor": Setup(tp=RANKS, dtype="fp32", seq=16, micro_batch=2),
    "sequence": Setup(tp=RANKS, sequence_parallel=True, dtype="fp32", seq=16, micro_batch=2, micro_batches=2),
    "ddp": Setup(dp=RANKS, dtype="fp32", seq=16, micro_batch=2),
}
"""Setups that two ranks run for real, and that are dry-run beside."""
CONFIG = {**SMALL, "model_type": "llama", "num_hidden_layers": 3}


def plan_of(name: str, recompute: str) -> Plan:
    layers = CONFIG["num_hidden_layers"]
    policy = Policy.everywhere(Recompute(recompute), layers)
    return Plan(setup=RUNS[name], layout=Layout.even(layers, pp=1), policy=policy)


@scenario
def recorded() -> Any:
    """What the recorder sees of real training steps."""
    found = {}
    for name, setup in RUNS.items():
        for recompute in ("none", "full"):
            plan = plan_of(name, recompute)
            mesh = make_mesh(setup)
            torch.manual_seed(0)
            model = model_builder(CONFIG, dtype=DTYPES[setup.parameter_dtype])()
            model = divided(model, plan, mesh)
            if setup.dp > 1 and setup.zero == 0:
                model = apply_data_parallel(model, find_parts(model), mesh["dp"], setup)
            recompute_layers(find_layers(model), plan.policy.full)
            optimizer = make_optimizer(setup.optimizer, model)
            training = Training(
                batch=lambda: dict.fromkeys(("input_ids", "labels"), tokens()), micro_batches=setup.micro_batches
            )
            with record(model=model, optimizer=optimizer) as recording:
                for _ in range(2):
                    step(training, setup.tp, model, optimizer)
                    recording.step()
            found[name, recompute] = encode(recording.ledger)
    return found


PIPELINES = {
    "gpipe": Setup(pp=2, schedule="gpipe", micro_batches=4, micro_batch=2, seq=16, dtype="fp32"),
    "1f1b": Setup(pp=2, schedule="1f1b", micro_batches=4, micro_batch=2, seq=16, dtype="fp32"),
    "interleaved": Setup(
        pp=2, interleave=2, schedule="interleaved_1f1b", micro_batches=4, micro_batch=2, seq=16, dtype="fp32"
    ),
}
"""Pipelines that two ranks run for real, and that are dry-run beside."""
DEEP = {**CONFIG, "num_hidden_layers": 5}


def pipeline_of(name: str, recompute: str) -> Plan:
    setup = PIPELINES[name]
    policy = Policy.everywhere(Recompute(recompute), 5)
    return Plan(setup=setup, layout=Layout.even(5, pp=2, interleave=setup.interleave), policy=policy)


@scenario
def recorded_pipelines() -> Any:
    """What the recorder sees of pipelines."""
    found = {}
    for name, setup in PIPELINES.items():
        for recompute in ("none", "full"):
            plan = pipeline_of(name, recompute)
            pipeline, _ = parallelize(model_builder(DEEP, dtype=torch.float32), plan)
            chunks = nn.ModuleList(pipeline.chunks)
            optimizer = make_optimizer(setup.optimizer, chunks)
            with record(model=chunks, optimizer=optimizer) as recording:
                for _ in range(2):
                    ids = torch.zeros((8, 16), dtype=torch.int64)
                    pipeline.step(ids, ids)
                    optimizer.step()
                    chunks.zero_grad()
                    recording.step()
            found[name, recompute] = encode(recording.ledger)
    return found


@scenario
def profiled() -> Any:
    """What two processes measure at once."""
    settings = RunSettings(implementation="reference")
    found = profile_here(CONFIG, "small", Setup(seq=16, micro_batch=2, dtype="fp32"), settings, rounds=2)
    sent = None if found.transfer is None else found.transfer.median
    return found.conditions.processes, sent, found.times["Block"]
