"""A plan as MindFormers r2.0 settings (PyNative mode)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from evenload.dialects.mindformers_pynative import layers_per_stage
from evenload.dialects.reading import Losses, Writing
from evenload.dialects.yaml_edit import block
from evenload.errors import EvenloadError
from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.plan import Plan
from evenload.plan.policy import LEVEL, Layers

_SCHEDULES: Final = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved_1f1b": "1f1b", "mindspore_interleaved": "1f1b"}


def write_pynative(plan: Plan) -> Writing:
    """The plan as a new file of MindFormers r2.0 settings.

    Raises:
        EvenloadError: a chunk without layers, which a range cannot name.
    """
    losses = Losses()
    setup, layout, policy = plan.setup, plan.layout, plan.policy
    for chunk, stage, layers in layout.chunks():
        if not layers:
            raise EvenloadError(
                f"chunk {chunk} of stage {stage} holds no layer, which layers per stage cannot say",
                where="$.layout",
                fix="give every chunk a layer, or write r1.x settings (--to mindformers)",
            )
    if setup.schedule not in _SCHEDULES:
        losses.add(f"MindFormers has no schedule {setup.schedule}; it runs 1f1b", "$.setup.schedule")
    for name, value in (
        ("select_exclude", policy.select_exclude),
        ("comm_exclude", policy.comm_exclude),
        ("optimizer_comm", policy.optimizer_comm),
        ("slice_activation", policy.slice_activation),
    ):
        if value:
            losses.add(f"{name} is left out: r2.0 settings have no switch for it", f"$.policy.{name}")
    sections: dict[str, Any] = {
        "training": {
            "local_batch_size": setup.micro_batch,
            "global_batch_size": setup.micro_batch * setup.micro_batches * setup.dp,
        },
        "parallelism": {
            "data_parallel": setup.dp,
            "data_parallel_shard": setup.dp if setup.zero else 1,
            "tensor_parallel": setup.tp,
            "context_parallel": setup.cp,
            "expert_parallel": setup.ep,
            "pipeline_parallel": setup.pp,
            "pipeline_parallel_schedule": _SCHEDULES.get(setup.schedule, "1f1b"),
            "pipeline_parallel_interleave_num": setup.interleave,
            "pipeline_parallel_layers_per_stage": layers_per_stage(layout),
        },
        "model": {"num_hidden_layers": layout.num_layers, "seq_length": setup.seq},
        "recompute": _recompute(plan),
    }
    if policy.comm:
        sections["recompute_comm"] = {"enable": True, "select_module": _modules(policy.comm)}
    if 0 < setup.zero < 3:
        losses.add(f"ZeRO stage {setup.zero} becomes a full shard (stage 3)", "$.setup.zero")
    if setup.tp > 1 and not setup.sequence_parallel:
        losses.add("sequence parallelism is always on with tensor parallelism", "$.setup.sequence_parallel")
    head = "# MindFormers r2.0 settings of an evenload plan: merge the sections into the model's own file.\n"
    return Writing(text=head + block(sections), losses=losses.notices)


def _recompute(plan: Plan) -> dict[str, Any]:
    policy = plan.policy
    values: dict[str, Any] = {"mode": "select" if policy.select else "full" if policy.full else "None"}
    if policy.full:
        values["full_recompute_layer"] = _specs(policy.full)
    if policy.select:
        values["select_module"] = _modules(policy.select)
    return values


def _modules(patterns: Mapping[str, Layers]) -> dict[str, list[str]]:
    return {pattern.replace(LEVEL, "."): _specs(layers) for pattern, layers in patterns.items()}


def _specs(layers: Layers) -> list[str]:
    return layer_ranges(layers).split(",")
