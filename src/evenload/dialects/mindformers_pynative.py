"""MindFormers r2.0 settings (PyNative mode), read into a plan.

Layers are named and not counted: `pipeline_parallel_layers_per_stage: ["0-3,8-11", "4-7,12-15"]` gives every stage its
chunks, and recomputation lists layers. MTP layers have the numbers after the last layer. Source: MindFormers r2.0,
"Configuration file description", and `mindformers/pynative/`.
"""

from __future__ import annotations

import re
from typing import Any, Final

from evenload.dialects.known_blocks import hugging_face_blocks, mindformers_llama, unmatched
from evenload.dialects.mindformers import without_empty
from evenload.dialects.mindformers_keys import PYNATIVE_SECTIONS, check_keys
from evenload.dialects.mindformers_model import as_hugging_face
from evenload.dialects.mindformers_settings import Sections, Settings
from evenload.dialects.ranges import read_ranges
from evenload.dialects.reading import Reading
from evenload.dialects.typed import at, listed, mapping, relocated, shown
from evenload.dialects.yaml_node import Step
from evenload.dialects.yaml_source import YamlSource
from evenload.errors import EvenloadError
from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.layout import Layout, Table
from evenload.plan.plan import Plan
from evenload.plan.policy import LEVEL, Layers, Policy
from evenload.plan.schedule import find_schedule
from evenload.setup import Setup

PARALLELISM: Final[Sections] = (("parallelism",), ("parallel_config",), ())
MODEL: Final[Sections] = (("model",), ("model", "model_config"), ("model_config",), ())
_TRAINING: Final[Sections] = (("training",), ())
_RECOMPUTE: Final[Sections] = (("recompute",),)
_RECOMPUTE_COMM: Final[Sections] = (("recompute_comm",),)
_SWAP: Final[Sections] = (("swap",),)
_LAYERS: Final = "pipeline_parallel_layers_per_stage"
_MODES: Final = ("None", "full", "select")
_RANGE: Final = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")
_ANY_LAYER: Final = re.compile(r"(?:[\w.]*\.)?layers\.(?:\.?\*|\d+|\\d\+|\[[^\]]*\][*+]?)\.")


def is_pynative(source: YamlSource) -> bool:
    """Whether the settings are in the r2.0 dialect."""
    keys = {*source.data, *(mapping(source.data.get("parallelism")) or {}), *(mapping(source.data.get("model")) or {})}
    recompute = mapping(source.data.get("recompute")) or {}
    return "parallelism" in keys or any(str(key).startswith("pipeline_parallel") for key in keys) or "mode" in recompute


def read_pynative(source: YamlSource, *, num_layers: int | None = None) -> Reading:
    """The plan in MindFormers r2.0 settings.

    Args:
        source: the file.
        num_layers: layers of the model, where the file does not name them.

    Raises:
        EvenloadError: with `file:line:column`.
    """
    settings = Settings(source=source)
    settings.notices.extend(check_keys(source, PYNATIVE_SECTIONS))
    layout = _layout(settings, _num_layers(settings, num_layers))
    written: dict[str, str] = {}
    places: dict[str, str] = {}
    policy = without_empty(_policy(settings, layout.num_layers, written, places))
    patterns = {name: len(layers) for switch in (policy.select, policy.comm) for name, layers in switch.items()}
    nowhere = unmatched(patterns, (*hugging_face_blocks(), mindformers_llama()), places=places)
    settings.notices.extend(nowhere.values())
    if settings.switch(_SWAP, "enable"):
        settings.note("swap is on: what it moves to the host is not part of a plan yet", "swap", "enable")
    named = settings.path(MODEL, "num_hidden_layers", "num_layers")
    model = mapping(at(source, named[:-1])) if named and len(named) > 1 else None
    return Reading(
        dialect="mindformers-pynative",
        plan=Plan(setup=_setup(settings, layout), layout=layout, policy=policy),
        notices=tuple(settings.all_notices()),
        model_config=as_hugging_face(model) if model else None,
        places=places,
        written=written,
    )


def house_pattern(text: str) -> str:
    r"""The plan's pattern for a module path of `select_module`, which is one regular expression over dotted names.

    Examples:
        >>> house_pattern("layers.*.self_attention.*"), house_pattern("mlp.linear_fc1")
        ('self_attention', 'mlp\\.linear_fc1')
    """
    path = _ANY_LAYER.sub("", text, count=1).replace(LEVEL, ".")
    path = re.sub(r"(?<=\w)(?<!_)\.\*$", "", path)  # everything below a module is the module
    # A dot that a quantifier follows stands for any letter; every other dot separates two levels.
    levels = re.split(r"\.(?![*+?{])", path)
    return LEVEL.join(".*" if level == "*" else level for level in levels)


def _num_layers(settings: Settings, given: int | None) -> int:
    if settings.path(MODEL, "num_hidden_layers", "num_layers") is None:
        if given is not None:
            return given
        raise EvenloadError(
            "the settings do not say how many layers the model has",
            where=settings.source.name,
            fix="add num_hidden_layers to model, or name the model with --model",
        )
    return settings.number(MODEL, "num_hidden_layers", "num_layers", absent=1)


def _layout(settings: Settings, num_layers: int) -> Layout:
    pp = settings.number(PARALLELISM, "pipeline_parallel", absent=1)
    path = settings.path(PARALLELISM, _LAYERS)
    value = settings.value(PARALLELISM, _LAYERS)
    interleave = settings.number(PARALLELISM, "pipeline_parallel_interleave_num", absent=1, quiet=True)
    if pp * interleave > 100_000:
        raise settings.source.error(f"{pp} stages x {interleave} chunks are more than any run has", *(path or ()))
    if path is None or value == "auto":
        return _auto(settings, num_layers, pp, interleave, path or ())
    if isinstance(value, str) and ("|" in value or pp == 1):
        value = value.split("|")
    stages = listed(value)
    if stages is None or len(stages) != pp:
        found = shown(value) if stages is None else f"{len(stages)} entries"
        raise settings.source.error(
            f"{_LAYERS} is {found} for {pp} stages", *path, fix='give one text per stage such as "0-3,8-11", or auto'
        )
    chunks = [_chunks_of(settings, entry, (*path, stage)) for stage, entry in enumerate(stages)]
    given = settings.path(PARALLELISM, "pipeline_parallel_interleave_num") is not None
    if not given and len(chunks[0]) > 1:
        interleave = len(chunks[0])
        settings.assumed.append(f"pipeline_parallel_interleave_num {interleave} (ranges of a stage)")
    for stage, ranges in enumerate(chunks):
        if len(ranges) != interleave:
            raise settings.source.error(
                f"stage {stage} has {len(ranges)} ranges of layers for {interleave} interleaves",
                *path,
                stage,
                fix="give every stage one range per interleave, separated by commas",
            )
    return Layout(_checked(settings, chunks, num_layers, path))


def _auto(settings: Settings, num_layers: int, pp: int, interleave: int, path: tuple[str, ...]) -> Layout:
    """`auto` is an even split, and nothing else."""
    share, left = divmod(num_layers, pp * interleave)
    if left:
        even = Layout.even(num_layers, pp=pp, interleave=interleave)
        raise settings.source.error(
            f"{num_layers} layers do not divide over {pp} stages x {interleave} chunks, and auto only divides evenly",
            *path,
            fix=f"{_LAYERS}: {layers_per_stage(even)} works; `evenload plan` finds the best",
        )
    return Layout(((share,) * pp,) * interleave)


def layers_per_stage(layout: Layout) -> list[str]:
    """The layers of every stage as `pipeline_parallel_layers_per_stage` has them.

    Examples:
        >>> layers_per_stage(Layout(((2, 2), (1, 2))))
        ['0-1,4', '2-3,5-6']
    """
    return [
        ",".join(layer_ranges(layout.layers(chunk, stage)) for chunk in range(layout.interleave))
        for stage in range(layout.pp)
    ]


def _chunks_of(settings: Settings, entry: Any, path: tuple[Step, ...]) -> list[range]:
    """The ranges of one stage, one a chunk, in the order in which they are written."""
    ranges: list[range] = []
    for part in str(entry).split(","):
        match = _RANGE.fullmatch(part)
        if match is None or isinstance(entry, bool):
            raise settings.source.error(
                f"{part.strip()!r} is no range of layers", *path, fix='write such as "0-3,8-11"'
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise settings.source.error(f"the range {first}-{last} runs backwards", *path, fix=f"write {last}-{first}")
        ranges.append(range(first, last + 1))
    return ranges


def _checked(settings: Settings, chunks: list[list[range]], num_layers: int, path: tuple[str, ...]) -> Table:
    """The table, if the chunks follow each other and hold every layer once; MTP layers may follow the last layer."""
    expected = 0
    rows: list[tuple[int, ...]] = []
    for chunk in range(len(chunks[0])):
        row: list[int] = []
        for stage, ranges in enumerate(chunks):
            if ranges[chunk].start != expected:
                raise settings.source.error(
                    f"chunk {chunk} of stage {stage} begins with layer {ranges[chunk].start}, and {expected} is next",
                    *path,
                    stage,
                    fix="layers go through all stages of the first chunk, then through all stages of the second",
                )
            expected = ranges[chunk].stop
            row.append(min(ranges[chunk].stop, num_layers) - min(ranges[chunk].start, num_layers))
        rows.append(tuple(row))
    predicted = settings.number(MODEL, "num_nextn_predict_layers", "mtp_num_layers", absent=0, quiet=True)
    if expected not in (num_layers, num_layers + predicted):
        raise settings.source.error(
            f"the stages hold layers 0 to {expected - 1}, the model has {num_layers}",
            *path,
            fix="name every layer once",
        )
    return tuple(rows)


def _policy(settings: Settings, num_layers: int, written: dict[str, str], places: dict[str, str]) -> Policy:
    mode_path = settings.path(_RECOMPUTE, "mode") or ()
    mode = settings.word(_RECOMPUTE, "mode") or "None"
    layers = settings.path(_RECOMPUTE, "full_recompute_layer")
    modules = settings.path(_RECOMPUTE, "select_module")
    if mode not in _MODES:
        raise settings.source.error(f"mode is {mode!r}", *mode_path, fix=f"use one of {', '.join(_MODES)}")
    if mode == "full" and layers is None:
        raise settings.source.error("mode full needs full_recompute_layer", *mode_path, fix="add ['0-3']")
    if mode == "select" and modules is None:
        raise settings.source.error("mode select needs select_module", *mode_path, fix="add {mlp: ['0-3']}")
    for path, needed in ((layers, mode != "None"), (modules, mode == "select")):
        if path is not None and not needed:
            settings.note(f"{path[-1]} says nothing under mode {mode}", *path)
    comm_on = settings.switch(_RECOMPUTE_COMM, "enable")
    comm_modules = settings.path(_RECOMPUTE_COMM, "select_module")
    if comm_on and comm_modules is None:
        raise settings.source.error("recompute_comm is on without select_module", "recompute_comm", "enable")
    return Policy(
        full=_layer_set(settings, layers, num_layers) if layers and mode != "None" else frozenset(),
        select=_modules(settings, modules, num_layers, written, places) if modules and mode == "select" else {},
        comm=_modules(settings, comm_modules, num_layers, written, places) if comm_modules and comm_on else {},
        select_exclude=_excluded(settings, frozenset(range(num_layers))) if mode != "None" else {},
    )


def _modules(
    settings: Settings, path: tuple[str, ...], num_layers: int, written: dict[str, str], places: dict[str, str]
) -> dict[str, Layers]:
    entries = mapping(at(settings.source, path))
    if entries is None:
        raise settings.source.error(
            f"select_module is {shown(at(settings.source, path))}", *path, fix="write `module path: ['0-3']` below it"
        )
    found: dict[str, Layers] = {}
    for text in entries:
        pattern = house_pattern(text)
        written[pattern] = text
        places[pattern] = settings.source.where(*path, text, key=True)
        found[pattern] = found.get(pattern, frozenset()) | _layer_set(settings, (*path, text), num_layers)
    return found


def _layer_set(settings: Settings, path: tuple[str, ...], num_layers: int) -> Layers:
    try:
        return read_ranges(at(settings.source, path), num_layers, where="$")
    except EvenloadError as error:
        raise relocated(settings.source, error, path) from None


def _excluded(settings: Settings, everywhere: Layers) -> dict[str, Layers]:
    """`exclude_op` names operators at any depth; a pattern has a fixed number of levels, so one for each depth."""
    path = settings.path(_RECOMPUTE, "exclude_op")
    if path is None:
        return {}
    names = listed(at(settings.source, path)) or [at(settings.source, path)]
    for place, name in enumerate(names):
        if not isinstance(name, str):
            raise settings.source.error(f"{shown(name)} is no operator", *path, place, fix="give names")
    depths = ("", rf".*{LEVEL}", rf".*{LEVEL}.*{LEVEL}")
    return {f"{depth}{re.escape(name)}": everywhere for name in names for depth in depths}


def _setup(settings: Settings, layout: Layout) -> Setup:
    tp = settings.number(PARALLELISM, "tensor_parallel", absent=1)
    local = settings.number(_TRAINING, "local_batch_size", absent=1, quiet=True)
    shard = settings.value(PARALLELISM, "data_parallel_shard")
    dp = settings.number(PARALLELISM, "data_parallel", absent=1, quiet=True)
    if isinstance(shard, int) and shard > 1 and dp == 1:
        dp = shard
    elif dp == 1 and shard in (None, -1):
        settings.assumed.append("data_parallel 1 (the file leaves it to the number of devices)")
    micro_batches = settings.number(PARALLELISM, "pipeline_parallel_microbatch_size", absent=1, quiet=True)
    batch = settings.number(_TRAINING, "global_batch_size", absent=local * dp * micro_batches, quiet=True)
    schedule = settings.word(PARALLELISM, "pipeline_parallel_schedule") or "1f1b"
    place = settings.path(PARALLELISM, "pipeline_parallel_schedule") or ()
    try:
        name = find_schedule(schedule, interleave=layout.interleave).name
        return Setup(
            pp=layout.pp,
            interleave=layout.interleave,
            tp=tp,
            sequence_parallel=tp > 1,  # on with tensor parallelism, and not to be switched off
            cp=settings.number(PARALLELISM, "context_parallel", absent=1, quiet=True),
            dp=dp,
            ep=settings.number(PARALLELISM, "expert_parallel", absent=1, quiet=True),
            etp=settings.number(PARALLELISM, "expert_tensor_parallel", absent=1, quiet=True),
            zero=0 if shard == 1 else 3,
            micro_batch=local,
            micro_batches=max(1, batch // (local * dp)),
            seq=settings.number(MODEL, "seq_length", absent=4096),
            backend="mindspore",
            schedule="mindspore_interleaved" if name == "interleaved_1f1b" else name,
            hardware="ascend-910b",
        )
    except EvenloadError as error:
        raise error.at(settings.source.where(*place)) from None
