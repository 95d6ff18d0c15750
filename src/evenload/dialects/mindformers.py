"""MindFormers r1.x settings (graph mode), read into a plan.

Sections may be missing: the documentation's own examples show single sections, and people keep them in several files.
What is assumed then is said in a warning. `model_config` may stand at the top or below `model`, and the keys that
matter here may stand at the top without their section.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from evenload.dialects.known_blocks import hugging_face_blocks, mindformers_llama, unmatched
from evenload.dialects.mindformers_keys import READ_HERE, SECTIONS, check_keys
from evenload.dialects.mindformers_model import as_hugging_face
from evenload.dialects.mindformers_settings import Sections, Settings
from evenload.dialects.mindformers_setup import MODEL, PARALLEL, PIPELINE, read_limit, read_setup
from evenload.dialects.reading import Reading, Tables
from evenload.dialects.typed import at, listed, mapping
from evenload.dialects.yaml_source import YamlSource, steps
from evenload.errors import EvenloadError, Notice
from evenload.plan.layer_setting import LayerSetting
from evenload.plan.plan import Plan
from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT, Policy

RECOMPUTE: Final[Sections] = (("recompute_config",), (), ("parallel_config", "recompute"), ("parallel_config",))
SWAP: Final[Sections] = (("swap_config",), ())
LISTS: Final = (
    "recompute",
    "select_recompute",
    "select_comm_recompute",
    "select_recompute_exclude",
    "select_comm_recompute_exclude",
)
"""Keys that say which layers; each is also an argument of `LayerSetting`."""
FLAGS: Final = ("parallel_optimizer_comm_recompute", "mp_comm_recompute", "recompute_slice_activation")
"""Keys that hold for the whole run; each is also an argument of `LayerSetting`."""
_PLACES: Final[dict[str, tuple[Sections, *tuple[str, ...]]]] = {
    "num_layers": (MODEL, "num_layers", "num_hidden_layers"),
    "offset": (MODEL, "offset"),
    "pp_interleave_num": (MODEL, "pp_interleave_num"),
    "pp": (PARALLEL, "pipeline_stage"),
    "swap": (SWAP, "swap"),
    **{name: (RECOMPUTE, name) for name in (*LISTS, *FLAGS)},
}
"""Argument of `LayerSetting` -> the sections and keys where it stands."""
_TURN_ON: Final = "set parallel.pipeline_config.pipeline_interleave: True"


def read_mindformers(source: YamlSource, *, num_layers: int | None = None) -> Reading:
    """The plan in MindFormers settings.

    Args:
        source: the file.
        num_layers: layers of the model, where the file does not name them.

    Raises:
        EvenloadError: with `file:line:column`.
    """
    settings = Settings(source=source)
    settings.notices.extend(check_keys(source, SECTIONS, READ_HERE))
    pp = _pipeline_stage(settings)
    interleave = _interleave(settings)
    swap = settings.switch(SWAP, "swap") or False
    setting = _layer_setting(settings, _num_layers(settings, num_layers), pp, interleave, swap=swap)
    policy = without_empty(setting.policy)
    places = _pattern_places(settings)
    nowhere = _unmatched(settings, policy, places)
    for notice in setting.notices:
        if not any(notice.fact.startswith(f"pattern '{pattern}' is a single level") for pattern in nowhere):
            settings.notices.append(replace(notice, where=_place(settings, notice.where, notice.fact)))
    settings.notices.extend(nowhere.values())
    if swap:
        settings.note("swap is on: what it moves to the host is not part of a plan yet", "swap_config", "swap")
    return Reading(
        dialect="mindformers",
        plan=Plan(setup=read_setup(settings, pp=pp, interleave=interleave), layout=setting.layout, policy=policy),
        notices=tuple(settings.all_notices()),
        limit=read_limit(settings),
        model_config=_model(settings),
        log=tuple(setting.log_lines()),
        tables=Tables(
            full=_table(setting.layer_recompute),
            select={pattern: _table(counts) for pattern, counts in setting.select_recompute.items()},
            comm={pattern: _table(counts) for pattern, counts in setting.select_comm_recompute.items()},
        ),
        places=places,
    )


def without_empty(policy: Policy) -> Policy:
    """The policy without patterns that are set on no layer."""
    return replace(
        policy,
        **{
            name: {pattern: layers for pattern, layers in getattr(policy, name).items() if layers}
            for name in ("select", "comm", "select_exclude", "comm_exclude")
        },
    )


def _num_layers(settings: Settings, given: int | None) -> int:
    path = settings.path(*_PLACES["num_layers"])
    if path is not None:
        return at(settings.source, path)
    if given is not None:
        return given
    raise EvenloadError(
        "the settings do not say how many layers the model has",
        where=settings.source.name,
        fix="add num_layers to model.model_config, or name the model with --model",
    )


def _pipeline_stage(settings: Settings) -> int:
    """`pipeline_stage`, or as many stages as the lists have entries."""
    if settings.path(PARALLEL, "pipeline_stage") is None:
        for name in ("offset", *LISTS):
            row = listed(settings.value(*_PLACES[name]))
            while row and (inner := listed(row[0])) is not None:
                row = inner
            if row and not any(isinstance(item, str) for item in row):
                settings.assumed.append(f"pipeline_stage {len(row)} (entries of {name})")
                return len(row)
    return settings.number(PARALLEL, "pipeline_stage", absent=1)


def _interleave(settings: Settings) -> int:
    """`pp_interleave_num`, which MindFormers takes as 1 unless `pipeline_interleave` is on."""
    path = settings.path(MODEL, "pp_interleave_num") or ()
    interleave = settings.number(MODEL, "pp_interleave_num", absent=1, quiet=True)
    on = settings.switch(PIPELINE, "pipeline_interleave")
    if interleave == 1 or on:
        return interleave
    if on is None:
        settings.note(
            "pipeline_interleave is not in the file, taken as on; MindFormers takes pp_interleave_num as 1 without it",
            *path,
            fix=_TURN_ON,
        )
        return interleave
    settings.note(
        f"pipeline_interleave is off, so MindFormers takes pp_interleave_num as 1 instead of {interleave}",
        *path,
        fix=_TURN_ON,
    )
    return 1


def _layer_setting(settings: Settings, num_layers: int, pp: int, interleave: int, *, swap: bool) -> LayerSetting:
    found = {name: settings.value(*_PLACES[name]) for name in ("offset", *LISTS, *FLAGS)}
    given = {name: value for name, value in found.items() if value is not None}
    try:
        return LayerSetting(num_layers, pp=pp, pp_interleave_num=interleave, swap=swap, **given)
    except EvenloadError as error:
        fix = error.fix
        if "interleave" in error.fact and settings.switch(PIPELINE, "pipeline_interleave") is False:
            fix = f"{_TURN_ON}; or {fix}"
        raise EvenloadError(error.fact, where=_place(settings, error.where, error.fact), fix=fix) from None


def _place(settings: Settings, where: str | None, fact: str) -> str:
    """Where a `$.path` of `LayerSetting` stands in the file: the pattern if the fact is about it, else its value."""
    head, *rest = steps(where or "$") or ("",)
    path = settings.path(*_PLACES[str(head)]) if head in _PLACES else None
    if path is None:
        return settings.source.name
    about_pattern = len(rest) == 1 and isinstance(rest[0], str) and rest[0] in fact
    return settings.source.where(*path, *rest, key=about_pattern)


def _pattern_places(settings: Settings) -> dict[str, str]:
    """Pattern -> where it is written, or where its default is switched on."""
    places: dict[str, str] = {}
    defaults = {"select_recompute": DEFAULT_SELECT, "select_comm_recompute": DEFAULT_COMM}
    for name in LISTS[1:]:
        path = settings.path(RECOMPUTE, name)
        if path is None:
            continue
        value = at(settings.source, path)
        patterns = mapping(value)
        items = listed(value)
        if patterns is not None:
            found = {pattern: settings.source.where(*path, pattern, key=True) for pattern in patterns}
        elif items and all(isinstance(item, str) for item in items):
            found = {item: settings.source.where(*path, place) for place, item in enumerate(items)}
        else:
            found = dict.fromkeys(defaults.get(name, ()), settings.source.where(*path))
        places = found | places
    return places


def _unmatched(settings: Settings, policy: Policy, places: dict[str, str]) -> dict[str, Notice]:
    """Warnings for patterns that name nothing in MindFormers' own blocks."""
    switches = (policy.select, policy.comm, policy.select_exclude, policy.comm_exclude)
    patterns = {pattern: len(layers) for switch in switches for pattern, layers in switch.items()}
    kind = settings.value(MODEL, "type") or settings.value((("model", "arch"),), "type")
    is_llama = kind in ("LlamaConfig", "LlamaForCausalLM")
    blocks = (mindformers_llama(),) if is_llama else (mindformers_llama(), *hugging_face_blocks())
    return unmatched(patterns, blocks, places=places)


def _model(settings: Settings) -> dict[str, object] | None:
    for section in MODEL[:2]:
        config = mapping(at(settings.source, section))
        if config is not None:
            architecture = settings.word((("model", "arch"),), "type")
            try:
                return as_hugging_face(config, architecture)
            except EvenloadError as error:
                raise error.at(settings.source.where(*section, *steps(error.where or "$"))) from None
    return None


def _table(counts: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, counts))
