"""torchtitan: a plan as settings, with what torchtitan cannot express.

The names are those of `ParallelismConfig`, `TrainingConfig` and `ActivationCheckpointConfig`; they are the same as TOML
sections and as fields of torchtitan's Python configurations. Source: torchtitan, `torchtitan/config/configs.py`.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

from evenload.dialects.reading import Losses, Writing
from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.setup import Setup

_SCHEDULES: Final = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "mindspore_interleaved": "Interleaved1F1B",
}
_CONFIGS: Final = {
    "parallelism": "ParallelismConfig",
    "training": "TrainingConfig",
    "activation_checkpoint": "ActivationCheckpointConfig",
}

Sections = dict[str, dict[str, Any]]


def write_torchtitan(plan: Plan, *, style: Literal["toml", "python"] = "toml") -> Writing:
    """The plan as torchtitan settings.

    Args:
        plan: the plan.
        style: `toml` for a job file, `python` for the keyword arguments of `Trainer.Config`.
    """
    losses = Losses()
    sections: Sections = {
        "parallelism": _parallelism(plan, losses),
        "training": _training(plan.setup, losses),
        "activation_checkpoint": {"mode": _checkpoint_mode(plan, losses)},
    }
    text = _toml(sections) if style == "toml" else _python(sections)
    head = f"# torchtitan settings of an evenload plan for {plan.setup.devices} devices.\n"
    return Writing(text=head + text, losses=losses.notices)


def model_parts(layout: Layout) -> list[list[str]]:
    """Module names of every chunk, in torchtitan's order: stage 0 to the last of the first chunk, then the next chunk.

    Examples:
        >>> model_parts(Layout(((1, 2),)))
        [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'output']]
    """
    parts = [[f"layers.{layer}" for layer in layers] for _, _, layers in layout.chunks()]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _parallelism(plan: Plan, losses: Losses) -> dict[str, Any]:
    setup, layout = plan.setup, plan.layout
    values: dict[str, Any] = {"pipeline_parallel_degree": setup.pp}
    if layout.pp * layout.interleave > 1:
        values["pipeline_parallel_schedule"] = _schedule(setup, losses)
        values["pipeline_parallel_microbatch_size"] = setup.micro_batch
        values["module_fqns_per_model_part"] = model_parts(layout)
    for _, stage, layers in layout.chunks():
        if not layers and layout.num_layers:
            losses.add(f"stage {stage} has a chunk without layers, which torchtitan may refuse", "$.layout")
            break
    sharded = setup.zero > 0
    values["data_parallel_replicate_degree"] = 1 if sharded else setup.dp
    values["data_parallel_shard_degree"] = setup.dp if sharded else 1
    if 0 < setup.zero < 3:
        values["fsdp_reshard_after_forward"] = "never"
        losses.add(
            f"ZeRO stage {setup.zero} becomes FSDP that gathers parameters once per step: they are stored in parts and "
            "held whole from forward to backward",
            "$.setup.zero",
        )
    elif setup.zero == 3:
        values["fsdp_reshard_after_forward"] = "always"
    values["tensor_parallel_degree"] = setup.tp
    if setup.tp > 1 and not setup.sequence_parallel:
        values["enable_sequence_parallel"] = False
    values["context_parallel_degree"] = setup.cp
    values["expert_parallel_degree"] = setup.ep
    return values


def _schedule(setup: Setup, losses: Losses) -> str:
    name = _SCHEDULES.get(setup.schedule)
    fitting = "1F1B" if setup.interleave == 1 else "Interleaved1F1B"
    if name is None or (name == "Interleaved1F1B") != (setup.interleave > 1):
        losses.add(f"schedule {setup.schedule} becomes torchtitan's {fitting}", "$.setup.schedule")
        return fitting
    return name


def _training(setup: Setup, losses: Losses) -> dict[str, Any]:
    values: dict[str, Any] = {
        "seq_len": setup.seq,
        "local_batch_size": setup.micro_batch * setup.micro_batches,
        "global_batch_size": setup.micro_batch * setup.micro_batches * setup.dp,
    }
    types = {"bf16": "bfloat16", "fp32": "float32"}
    if setup.dtype not in types:
        losses.add(f"torchtitan trains in bfloat16 or float32, not in {setup.dtype}", "$.setup.dtype")
    elif setup.main_copies or setup.dtype == "fp32":
        values["dtype"] = "float32"
        values["mixed_precision_param"] = types[setup.dtype]
    else:
        values["dtype"] = types[setup.dtype]
    return values


def _checkpoint_mode(plan: Plan, losses: Losses) -> str:
    policy, num_layers = plan.policy, plan.layout.num_layers
    views = [policy.for_layer(layer) for layer in range(num_layers)]
    full = frozenset(layer for layer, view in enumerate(views) if view.full)
    selected = frozenset(layer for layer, view in enumerate(views) if view.select)
    if any(view.comm for view in views):
        losses.add("recomputed communication is left out", "$.policy.comm")
    for name, value in (("optimizer_comm", policy.optimizer_comm), ("slice_activation", policy.slice_activation)):
        if value:
            losses.add(f"{name} is left out", f"$.policy.{name}")
    if not policy.mp_comm and plan.setup.tp > 1 and full:
        losses.add("collectives in recomputed layers run again; the plan keeps their results", "$.policy.mp_comm")
    if full:
        if len(full) < num_layers:
            losses.add(
                f"torchtitan checkpoints every layer or none: layers {layer_ranges(full)} are planned, "
                f"all {num_layers} are recomputed",
                "$.policy.full",
            )
        return "full"
    if selected:
        losses.add(
            "torchtitan has its own choice of operators for selective checkpointing, in every layer: "
            + ", ".join(f"'{pattern}'" for pattern in policy.select)
            + f" on layers {layer_ranges(selected)} cannot be named",
            "$.policy.select",
            "compare `evenload estimate` for this plan with a measured run",
        )
        return "selective"
    return "none"


def _toml(sections: Sections) -> str:
    lines: list[str] = []
    for section, values in sections.items():
        lines += ["", f"[{section}]", *(f"{key} = {_literal(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _python(sections: Sections) -> str:
    lines: list[str] = []
    for section, values in sections.items():
        lines += [f"{section}={_CONFIGS[section]}("]
        for key, value in values.items():
            literal = str(value) if isinstance(value, bool) else _literal(value)
            lines.append(f"    {key}={literal},")
        lines.append("),")
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    """A value that TOML and Python write alike, lists of lists one row a line."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        # rows are of any type: JSON refuses what it cannot write
        rows = ",\n".join(f"    {json.dumps(row)}" for row in value)  # pyright: ignore[reportUnknownVariableType]
        return f"[\n{rows},\n]"
    return json.dumps(value)
