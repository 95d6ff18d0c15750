"""A plan as MindFormers r1.x settings: into a file that people already have, or as a new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from evenload.dialects.mindformers import LISTS, RECOMPUTE, SWAP
from evenload.dialects.mindformers_settings import Sections, Settings
from evenload.dialects.mindformers_setup import MODEL, PARALLEL, PIPELINE, SETUP_PATHS, TYPES
from evenload.dialects.reading import Losses, Writing
from evenload.dialects.typed import at, listed
from evenload.dialects.yaml_edit import block, edit
from evenload.dialects.yaml_source import YamlSource
from evenload.errors import EvenloadError
from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.layout import Layout, Table
from evenload.plan.plan import Plan
from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT, Layers, Policy, counts, first_layers

_SCHEDULERS: Final = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved_1f1b": "1f1b", "mindspore_interleaved": "1f1b"}
_DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "select_recompute": DEFAULT_SELECT,
    "select_comm_recompute": DEFAULT_COMM,
}
_SWITCHES: Final = {
    "select_recompute": "select",
    "select_comm_recompute": "comm",
    "select_recompute_exclude": "select_exclude",
    "select_comm_recompute_exclude": "comm_exclude",
}
"""MindFormers' key -> field of `Policy`."""


def write_mindformers(plan: Plan, into: YamlSource | None = None) -> Writing:
    """The plan as MindFormers settings.

    Args:
        plan: the plan.
        into: settings to put the plan into. Only `offset`, `pp_interleave_num`, `pipeline_interleave` and
            `recompute_config` change; comments, order and everything else stay. None: a new file.

    Raises:
        EvenloadError: a switch of the policy is not "the first n layers of each chunk", which is all that the tables of
            counts can say; or the file is for another number of stages or layers.
    """
    losses = Losses()
    if plan.setup.schedule not in _SCHEDULERS:
        losses.add(f"MindFormers has no schedule {plan.setup.schedule}; it runs 1f1b", "$.setup.schedule")
    if into is None:
        head = "# MindFormers settings of an evenload plan: merge the sections into the model's own file.\n"
        return Writing(text=head + block(_new_file(plan)), losses=losses.notices)
    settings = Settings(source=into)
    _check_target(settings, plan, losses)
    layer_ids = settings.switch(SWAP, "swap") or False
    if layer_ids:
        losses.add("swap is on in the file, so the recompute lists are written as layers, not as counts", "$.policy")
    return Writing(text=edit(into, _changes(settings, plan, layer_ids=layer_ids)), losses=losses.notices)


def _new_file(plan: Plan) -> dict[str, Any]:
    setup, layout = plan.setup, plan.layout
    sharded: dict[str, Any] = {"enable_parallel_optimizer": setup.zero > 0}
    if setup.zero > 1:
        sharded["parallel_optimizer_config"] = {"optimizer_level": f"level{setup.zero}"}
    names = {ours: theirs for theirs, ours in TYPES.items()}
    return {
        "runner_config": {"batch_size": setup.micro_batch},
        "parallel": {
            **sharded,
            "pipeline_config": {
                "pipeline_interleave": layout.interleave > 1,
                "pipeline_scheduler": _SCHEDULERS.get(setup.schedule, "1f1b"),
            },
        },
        "parallel_config": {
            "data_parallel": setup.dp,
            "model_parallel": setup.tp,
            "pipeline_stage": setup.pp,
            "context_parallel": setup.cp,
            "expert_parallel": setup.ep,
            "micro_batch_num": setup.micro_batches,
            "use_seq_parallel": setup.sequence_parallel,
        },
        "recompute_config": _recompute(plan.policy, layout),
        "model": {
            "model_config": {
                "num_layers": layout.num_layers,
                "seq_length": setup.seq,
                "compute_dtype": names.get(setup.dtype, "bfloat16"),
                "use_flash_attention": setup.attention == "sdpa",
                "pp_interleave_num": layout.interleave,
                "offset": _offset(layout),
            }
        },
    }


def _changes(settings: Settings, plan: Plan, *, layer_ids: bool) -> dict[tuple[str, ...], Any]:
    """Path -> new value; keys that are missing and would only say the default are left out."""
    layout = plan.layout
    model = next((section for section in MODEL if at(settings.source, section) is not None and section), MODEL[0])
    changes: dict[tuple[str, ...], Any] = {}
    offset = settings.path(MODEL, "offset")
    if offset is not None or _offset(layout) != 0:
        changes[offset or (*model, "offset")] = _offset(layout)
    interleave = settings.path(MODEL, "pp_interleave_num")
    if interleave is not None or layout.interleave > 1:
        changes[interleave or (*model, "pp_interleave_num")] = layout.interleave
    switch = settings.path(PIPELINE, "pipeline_interleave")
    if switch is not None or layout.interleave > 1:
        changes[switch or (*PIPELINE[0], "pipeline_interleave")] = layout.interleave > 1
    defaults = _recompute(Policy(), layout)
    for name, value in _recompute(plan.policy, layout, layer_ids=layer_ids).items():
        path = settings.path(RECOMPUTE, name)
        if path is not None or value != defaults[name]:
            changes[path or (*RECOMPUTE[0], name)] = value
    return changes


def _recompute(policy: Policy, layout: Layout, *, layer_ids: bool = False) -> dict[str, Any]:
    values: dict[str, Any] = {"recompute": _layers(policy.full, frozenset(), layout, "recompute", layer_ids=layer_ids)}
    for key, name in _SWITCHES.items():
        patterns: Mapping[str, Layers] = getattr(policy, name)
        if key.endswith("_exclude") and not patterns:
            values[key] = False
            continue
        values[key] = _patterns(patterns, policy.full, layout, key, layer_ids=layer_ids)
    return {key: values[key] for key in LISTS} | {
        "parallel_optimizer_comm_recompute": policy.optimizer_comm,
        "mp_comm_recompute": policy.mp_comm,
        "recompute_slice_activation": policy.slice_activation,
    }


def _patterns(patterns: Mapping[str, Layers], full: Layers, layout: Layout, key: str, *, layer_ids: bool) -> Any:
    """The shortest form: a bool or counts for the default patterns, a list of patterns that are on everywhere, each."""
    if not any(patterns.values()):
        return False
    beaten = full if not key.endswith("_exclude") else frozenset[int]()
    values = {
        pattern: _layers(layers, beaten, layout, f"{key}['{pattern}']", layer_ids=layer_ids)
        for pattern, layers in patterns.items()
    }
    if tuple(values) == _DEFAULTS.get(key) and len({repr(value) for value in values.values()}) == 1:
        return next(iter(values.values()))
    return list(values) if all(value is True for value in values.values()) else values


def _layers(layers: Layers, beaten: Layers, layout: Layout, key: str, *, layer_ids: bool) -> Any:
    """True, False, layer numbers, or counts per stage, or per chunk where there are several.

    Layers in `beaten` are recomputed whole whatever the counts say, so counts may run over them.
    """
    if not layers:
        return False
    if len(layers) == layout.num_layers:
        return True
    if layer_ids:
        return sorted(layers)
    table = _counts(layers, beaten, layout, key)
    return list(table[0]) if layout.interleave == 1 else [list(row) for row in table]


def _counts(layers: Layers, beaten: Layers, layout: Layout, key: str) -> Table:
    table = counts(layers, layout)
    if first_layers(table, layout) == layers:
        return table
    rows: list[list[int]] = [[0] * layout.pp for _ in range(layout.interleave)]
    for chunk, stage, held in layout.chunks():
        wanted = layers.intersection(held) - beaten
        count = max((layer - held.start + 1 for layer in wanted), default=0)
        if not wanted >= frozenset(held[:count]) - beaten:
            inside = layer_ranges(layers.intersection(held))
            raise EvenloadError(
                f"MindFormers counts the first layers of a chunk, and {key} is planned for layers {inside} of chunk "
                f"{chunk} on stage {stage}, which holds layers {layer_ranges(held)}",
                where=f"$.policy.{key}",
                fix="plan the first layers of each chunk, or write the plan as evenload YAML",
            )
        rows[chunk][stage] = count
    return tuple(map(tuple, rows))


def _offset(layout: Layout) -> Any:
    """0 for an even split, one number per stage, or one row per interleave."""
    offsets = layout.offsets()
    if not any(map(any, offsets)):
        return 0
    return list(offsets[0]) if layout.interleave == 1 else [list(row) for row in offsets]


def _check_target(settings: Settings, plan: Plan, losses: Losses) -> None:
    """The file must be for the same stages and layers; other settings that differ are named."""
    for names, ours, sections in (
        (("pipeline_stage",), plan.setup.pp, PARALLEL),
        (("num_layers", "num_hidden_layers"), plan.layout.num_layers, MODEL),
    ):
        path = settings.path(sections, *names)
        if path is not None and at(settings.source, path) != ours:
            raise settings.source.error(
                f"the file has {path[-1]} {at(settings.source, path)}, the plan is for {ours}",
                *path,
                fix="name the file that the plan was made for",
            )
    for name, (sections, key) in SETUP_PATHS.items():
        if name in ("pp", "interleave", "micro_batch"):
            continue
        theirs, ours = _stated(settings, sections, key), getattr(plan.setup, name)
        if theirs is not None and theirs != ours:
            losses.add(f"the plan was made for {key} {ours}, the file says {theirs} and keeps it", f"$.setup.{name}")


def _stated(settings: Settings, sections: Sections, key: str) -> Any:
    value = settings.value(sections, key)
    return TYPES.get(value, value) if key == "compute_dtype" and listed(value) is None else value
