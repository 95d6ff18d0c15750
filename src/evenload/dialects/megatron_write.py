"""Megatron-LM: a plan as arguments, with what Megatron-LM cannot express.

Where it cannot, more is recomputed than the plan asks for if Megatron-LM knows a way to, so that a run with these
arguments fits where the plan fits; where it knows none, the loss says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from evenload.dialects.known_blocks import hugging_face_blocks
from evenload.dialects.megatron import MODULES
from evenload.dialects.megatron_layout import write_layout_string
from evenload.dialects.reading import Losses, Writing
from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.layout import Layout, Table
from evenload.plan.operators import Graph
from evenload.plan.patterns import match
from evenload.plan.plan import Plan
from evenload.plan.policy import Layers, Policy, counts, first_layers
from evenload.setup import Setup

_SCHEDULES: Final = ("1f1b", "interleaved_1f1b", "mindspore_interleaved")
_SMALLEST_FIRST: Final = ("layernorm", "core_attn", "mla_up_proj", "moe_act", "shared_experts", "mlp", "moe")
_DENSE_ONLY: Final = "mlp"
_EXPERTS_ONLY: Final = ("moe_act", "shared_experts", "moe")


def write_megatron(plan: Plan, *, mtp: int = 0) -> Writing:
    """The plan as a bash array of Megatron-LM arguments.

    Args:
        plan: the plan.
        mtp: multi-token-prediction layers of the model, which a layout string must place.
    """
    losses = Losses()
    lines = [
        *_sizes(plan, losses),
        *_layout_arguments(plan.layout, mtp, losses),
        *_recompute_arguments(plan, losses),
    ]
    text = "\n".join(
        [
            f"# Megatron-LM arguments of an evenload plan for {plan.setup.devices} devices (dp {plan.setup.dp}).",
            'EVENLOAD_ARGS=(  # torchrun ... pretrain_gpt.py "${EVENLOAD_ARGS[@]}" ...',
            *(f"    {line}" for line in lines),
            ")",
        ]
    )
    return Writing(text=text + "\n", losses=losses.notices)


def _sizes(plan: Plan, losses: Losses) -> Iterable[str]:
    setup = plan.setup
    _size_losses(setup, losses)
    yield f"--num-layers {plan.layout.num_layers}"
    yield f"--pipeline-model-parallel-size {setup.pp}"
    yield f"--tensor-model-parallel-size {setup.tp}"
    if setup.cp > 1:
        yield f"--context-parallel-size {setup.cp}"
    if setup.ep > 1:
        yield f"--expert-model-parallel-size {setup.ep}"
    if setup.etp is not None:
        yield f"--expert-tensor-parallel-size {setup.etp}"
    if setup.sequence_parallel:
        yield "--sequence-parallel"
    if setup.zero:
        yield "--use-distributed-optimizer"
    if setup.dtype in ("bf16", "fp16"):
        yield f"--{setup.dtype}"
    yield f"--seq-length {setup.seq}"
    yield f"--micro-batch-size {setup.micro_batch}"
    yield f"--global-batch-size {setup.micro_batch * setup.micro_batches * setup.dp}"


def _size_losses(setup: Setup, losses: Losses) -> None:
    if setup.zero > 1:
        what = "optim_grads" if setup.zero == 2 else "optim_grads_params"
        losses.add(
            f"ZeRO stage {setup.zero} is written as --use-distributed-optimizer, which shards less (stage 1)",
            "$.setup.zero",
            f"add --use-megatron-fsdp --data-parallel-sharding-strategy {what}",
        )
    if setup.schedule not in _SCHEDULES:
        losses.add(
            f"Megatron-LM has no schedule {setup.schedule}; it runs 1F1B, interleaved where there are chunks",
            "$.setup.schedule",
        )
    if setup.interleave > 1 and setup.micro_batches % setup.pp:
        losses.add(
            f"Megatron-LM interleaves micro-batches in multiples of the {setup.pp} stages; "
            f"the plan has {setup.micro_batches}",
            "$.setup.micro_batches",
            "change the batch, or set --microbatch-group-size-per-virtual-pipeline-stage",
        )


def _layout_arguments(layout: Layout, mtp: int, losses: Losses) -> list[str]:
    flat = [count for row in layout.table for count in row]
    if layout.pp == 1:
        if layout.interleave > 1:
            losses.add("Megatron-LM has no chunks on a single stage; they are left out", "$.setup.interleave")
        return []
    if not mtp and len(set(flat)) == 1:
        return [f"--num-layers-per-virtual-pipeline-stage {flat[0]}"] if layout.interleave > 1 else []
    if not mtp and layout.interleave == 1 and all(flat):
        first, *middle, last = flat
        if len({first, *middle}) == 1:
            return [f"--decoder-last-pipeline-num-layers {last}"]
        if len({*middle, last}) == 1:
            return [f"--decoder-first-pipeline-num-layers {first}"]
        if len(set(middle)) == 1:
            return [f"--decoder-first-pipeline-num-layers {first}", f"--decoder-last-pipeline-num-layers {last}"]
    return [f"--pipeline-model-parallel-layout '{write_layout_string(layout, mtp=mtp)}'"]


def _recompute_arguments(plan: Plan, losses: Losses) -> list[str]:
    policy, layout = plan.policy, plan.layout
    views = [policy.for_layer(layer) for layer in range(layout.num_layers)]
    full = frozenset(layer for layer, view in enumerate(views) if view.full)
    selected = frozenset(layer for layer, view in enumerate(views) if view.select)
    if any(view.comm for view in views):
        losses.add(
            "recomputed communication is left out: in backward Megatron-LM gathers the input of column-parallel layers "
            "again by itself, and has no argument for other collectives",
            "$.policy.comm",
        )
    if policy.optimizer_comm:
        losses.add("gathering sharded parameters again has no argument", "$.policy.optimizer_comm")
    if full:
        return _full_arguments(plan, full, selected, losses)
    return _selective_arguments(policy, layout.num_layers, selected, losses) if selected else []


def _full_arguments(plan: Plan, full: Layers, selected: Layers, losses: Losses) -> list[str]:
    layout, setup = plan.layout, plan.setup
    table = counts(full | selected, layout)
    most = max(map(max, table))
    block = first_layers(tuple((most,) * layout.pp for _ in range(layout.interleave)), layout)
    if selected:
        losses.add(
            f"Megatron-LM recomputes whole layers or modules, not both: layers {layer_ranges(selected)} are recomputed "
            "whole instead of in part",
            "$.policy.select",
        )
    if block != full | selected:
        losses.add(
            f"Megatron-LM has one recompute count: the plan's {_shown(table)} becomes the first {most} layers of every "
            f"{'chunk' if layout.interleave > 1 else 'stage'}, {len(block) - len(full | selected)} more than planned",
            "$.policy.full",
        )
    if not plan.policy.mp_comm and setup.tp > 1:
        losses.add(
            "in recomputed layers Megatron-LM runs tensor-parallel collectives again; the plan keeps their results",
            "$.policy.mp_comm",
        )
    everywhere = len(block) == layout.num_layers
    lines = ["--recompute-granularity full", f"--recompute-method {'uniform' if everywhere else 'block'}"]
    lines.append(f"--recompute-num-layers {1 if everywhere else most}")
    if plan.policy.slice_activation and setup.tp > 1 and not setup.sequence_parallel:
        lines.append("--distribute-saved-activations")
    return lines


def _selective_arguments(policy: Policy, num_layers: int, selected: Layers, losses: Losses) -> list[str]:
    patterns = {pattern: layers for pattern, layers in policy.select.items() if layers & selected}
    modules: list[str] = []
    for pattern, layers in patterns.items():
        named = _modules_of(pattern)
        modules += [module for module in named if module not in modules]
        if not named:
            losses.add(
                f"no module of --recompute-modules holds what '{pattern}' names: it is left out, and these layers keep "
                "more than planned",
                "$.policy.select",
                f"Megatron-LM recomputes {', '.join(MODULES)}",
            )
        elif len(layers) < num_layers:
            losses.add(
                f"'{pattern}' is planned for layers {layer_ranges(layers)}; Megatron-LM recomputes in every layer",
                "$.policy.select",
            )
    if "moe" in modules:
        modules = [module for module in modules if module not in ("moe_act", "shared_experts")]  # parts of it
    for module in modules:
        if not _hold_all(patterns, module):
            losses.add(f"the whole module {module} is recomputed, more than the patterns name", "$.policy.select")
    if policy.select_exclude:
        losses.add("excluded operators cannot be named: they are recomputed", "$.policy.select_exclude")
    return ["--recompute-granularity selective", f"--recompute-modules {' '.join(modules)}"] if modules else []


def _modules_of(pattern: str) -> list[str]:
    """Modules that together hold every operator a pattern names, in the first kind of block where it names any."""
    for kind, block in enumerate(hugging_face_blocks()):
        left = set(match(pattern, block).indices)
        if not left:
            continue
        # Megatron-LM calls the same place mlp in a dense layer and moe in one with experts.
        here = [name for name in _SMALLEST_FIRST if (name != _DENSE_ONLY if kind else name not in _EXPERTS_ONLY)]
        inside = {name: _inside(name, block) for name in here}
        alone = next((name for name in here if left <= inside[name]), None)
        if alone is not None:
            return [alone]
        found = [name for name in here if left & inside[name]]
        return found if left <= set().union(*(inside[name] for name in found)) else []
    return []


def _hold_all(patterns: Iterable[str], module: str) -> bool:
    """Whether patterns together name everything that a module holds."""
    block = hugging_face_blocks()[2 if module == "mla_up_proj" else 1 if module in _EXPERTS_ONLY else 0]
    named = {index for pattern in patterns for index in match(pattern, block).indices}
    return _inside(module, block) <= named


def _inside(module: str, block: Graph) -> set[int]:
    return {index for name in MODULES[module] for index in match(name, block).indices}


def _shown(table: Table) -> str:
    return str(list(table[0]) if len(table) == 1 else [list(row) for row in table])
