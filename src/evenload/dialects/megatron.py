"""Megatron-LM: its arguments read into a plan.

Megatron-LM recomputes either whole layers (`full`: `uniform` units over all layers, or a `block` of the first n layers
of every chunk) or named modules of every layer (`selective`). Source: Megatron-LM, `megatron/training/arguments.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from evenload.dialects.megatron_args import Arguments, read_arguments
from evenload.dialects.megatron_layout import read_layout_string, write_layout_string
from evenload.dialects.reading import Reading
from evenload.errors import EvenloadError, Notice, did_you_mean
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Layers, Policy, first_layers
from evenload.setup import Setup

MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "core_attn": (r"self_attention\.core_attention",),
    "layernorm": ("input_layernorm", "pre_mlp_layernorm"),
    "mla_up_proj": (r"self_attention\.linear_q_up_proj", r"self_attention\.linear_kv_up_proj"),
    "mlp": ("mlp",),
    "moe": (r"mlp\.router", r"mlp\.experts", r"mlp\.shared_experts"),
    "moe_act": (r"mlp\.experts\.activation_func",),
    "shared_experts": (r"mlp\.shared_experts",),
}
"""`--recompute-modules` -> the patterns that name the same operators."""

_MOST: Final = 100_000
_LAYOUT: Final = "--pipeline-model-parallel-layout"
_FIRST: Final = "--decoder-first-pipeline-num-layers"
_LAST: Final = "--decoder-last-pipeline-num-layers"
_PER_CHUNK: Final = "--num-layers-per-virtual-pipeline-stage"
_CHUNKS: Final = "--num-virtual-stages-per-pipeline-rank"
_EMBEDDING: Final = "--account-for-embedding-in-pipeline-split"
_LOSS: Final = "--account-for-loss-in-pipeline-split"


def read_megatron(text: str, *, name: str = "arguments") -> Reading:
    """The plan that Megatron-LM would build from its arguments.

    Raises:
        EvenloadError: arguments that Megatron-LM refuses or, worse, with which it builds fewer layers than asked for.
    """
    arguments = read_arguments(text, name=name)
    layout = _layout(arguments)
    policy, notices = _policy(arguments, layout)
    micro_batch = _positive(arguments, "--micro-batch-size", 1)
    batch = _positive(arguments, "--global-batch-size", micro_batch)
    if batch % micro_batch:
        raise EvenloadError(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {micro_batch}",
            where=arguments.where("--global-batch-size"),
        )
    if arguments.flag("--global-batch-size"):
        said = f"taken as 1, which makes {batch // micro_batch} micro-batches"
        notices.append(
            Notice(
                fact=f"the arguments do not name the data-parallel size: {said}",
                where=arguments.where("--global-batch-size"),
            )
        )
    setup = _setup(
        arguments,
        pp=layout.pp,
        interleave=layout.interleave,
        tp=arguments.number("--tensor-model-parallel-size"),
        sequence_parallel=arguments.flag("--sequence-parallel"),
        cp=arguments.number("--context-parallel-size"),
        ep=arguments.number("--expert-model-parallel-size"),
        etp=arguments.number("--expert-tensor-parallel-size"),
        zero=1 if arguments.flag("--use-distributed-optimizer") else 0,
        micro_batch=micro_batch,
        micro_batches=batch // micro_batch,
        seq=arguments.number("--seq-length"),
        dtype="bf16" if arguments.flag("--bf16") else "fp16" if arguments.flag("--fp16") else "fp32",
        backend="megatron",
        schedule="1f1b" if layout.interleave == 1 else "interleaved_1f1b",
    )
    return Reading(
        dialect="megatron",
        plan=Plan(setup=setup, layout=layout, policy=policy),
        notices=(*layout.notices(arguments.name), *notices),
    )


def uniform_units(num_layers: int, size: int) -> tuple[range, ...]:
    """The units of `--recompute-method uniform`: `size` layers each, the last one what is left.

    Only the input of a unit is kept; the unit is recomputed whole.

    Examples:
        >>> [len(unit) for unit in uniform_units(24, 7)]
        [7, 7, 7, 3]
    """
    return tuple(range(start, min(start + size, num_layers)) for start in range(0, num_layers, size))


def _setup(arguments: Arguments, **values: Any) -> Setup:
    try:
        return Setup(**{name: value for name, value in values.items() if value is not None})
    except EvenloadError as error:
        raise error.at(arguments.name) from None


def _layout(arguments: Arguments) -> Layout:
    pp = _positive(arguments, "--pipeline-model-parallel-size", 1)
    if arguments.flag(_LAYOUT):
        return _layout_of_string(arguments, pp)
    if not arguments.flag("--num-layers"):
        raise EvenloadError("the arguments do not name the layers", where=arguments.name, fix="add --num-layers")
    num_layers = _positive(arguments, "--num-layers", 1)
    first, last = arguments.number(_FIRST), arguments.number(_LAST)
    if first is not None or last is not None:
        return _layout_of_ends(arguments, num_layers, pp, first, last)
    embedding, loss = int(arguments.flag(_EMBEDDING)), int(arguments.flag(_LOSS))
    counted = num_layers + embedding + loss
    interleave = _interleave(arguments, counted, pp)
    share, left = divmod(counted, pp * interleave)
    if left or not share:
        raise EvenloadError(
            f"{_said(counted, num_layers)} do not divide over {_chunks(pp, interleave)}: "
            f"with {share} each, {share * pp * interleave} of {counted} would be built",
            where=arguments.where("--num-layers"),
            fix=_use_layout(num_layers, pp, interleave),
        )
    rows = [[share] * pp for _ in range(interleave)]
    rows[0][0] -= embedding  # the embedding takes the place of a layer in the first chunk, the loss in the last
    rows[-1][-1] -= loss
    if rows[0][0] < 0 or rows[-1][-1] < 0:
        raise EvenloadError("embedding and loss leave a chunk below zero layers", where=arguments.where(_EMBEDDING))
    return Layout(tuple(map(tuple, rows)))


def _layout_of_string(arguments: Arguments, pp: int) -> Layout:
    for other in (_FIRST, _LAST, _PER_CHUNK, _CHUNKS, _EMBEDDING, _LOSS):
        if arguments.flag(other):
            raise EvenloadError(f"{other} and {_LAYOUT} exclude each other", where=arguments.where(other))
    where = arguments.where(_LAYOUT)
    layout, mtp = read_layout_string(arguments.word(_LAYOUT) or "", pp=pp, where=where)
    for name, holds, what in (("--num-layers", layout.num_layers, "layers"), ("--mtp-num-layers", mtp, "MTP layers")):
        stated = arguments.number(name)
        if stated is not None and stated != holds:
            raise EvenloadError(f"the layout holds {holds} {what}, {name} says {stated}", where=where)
    return layout


def _layout_of_ends(arguments: Arguments, num_layers: int, pp: int, first: int | None, last: int | None) -> Layout:
    """Counts of the first and the last stage are given; the stages between share the rest evenly."""
    given = _FIRST if first is not None else _LAST
    for other in (_EMBEDDING, _LOSS, _PER_CHUNK):
        if arguments.flag(other):
            fix = f"use {_CHUNKS}" if other == _PER_CHUNK else None
            raise EvenloadError(f"{other} and {given} exclude each other", where=arguments.where(other), fix=fix)
    interleave = _positive(arguments, _CHUNKS, 1)
    middle = pp - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    if middle < 0 or rest < 0 or (rest % middle if middle else rest) or min(first or 0, last or 0) < 0:
        raise EvenloadError(
            f"{rest} layers are left for {middle} stages, which do not share them evenly",
            where=arguments.where(given),
            fix=_use_layout(num_layers, pp, interleave),
        )
    share = rest // middle if middle else 0
    per_stage = [*([] if first is None else [first]), *[share] * middle, *([] if last is None else [last])]
    for stage, layers in enumerate(per_stage):
        if layers % interleave:
            raise EvenloadError(
                f"the {layers} layers of stage {stage} do not divide over {interleave} chunks",
                where=arguments.where(_CHUNKS),
                fix=_use_layout(num_layers, pp, interleave),
            )
    return Layout((tuple(layers // interleave for layers in per_stage),) * interleave)


def _interleave(arguments: Arguments, counted: int, pp: int) -> int:
    if not arguments.flag(_PER_CHUNK):
        return _positive(arguments, _CHUNKS, 1)
    if arguments.flag(_CHUNKS):
        raise EvenloadError(f"{_PER_CHUNK} and {_CHUNKS} exclude each other", where=arguments.where(_PER_CHUNK))
    per_chunk = _positive(arguments, _PER_CHUNK, 1)
    if counted % (pp * per_chunk):
        raise EvenloadError(
            f"{counted} layers are no multiple of {pp} stages x {per_chunk} layers in a chunk",
            where=arguments.where(_PER_CHUNK),
            fix=_use_layout(counted, pp, 1),
        )
    return counted // (pp * per_chunk)


def _policy(arguments: Arguments, layout: Layout) -> tuple[Policy, list[Notice]]:
    granularity = arguments.word("--recompute-granularity")
    if granularity is None and arguments.flag("--recompute-activations"):
        granularity = "selective"
    if granularity is None:
        _refuse_without(arguments, "--recompute-granularity", "--recompute-method", "--recompute-modules")
        return Policy(), []
    if granularity == "selective":
        _refuse_with(arguments, "selective", "--recompute-method", "--recompute-num-layers")
        return _selective(arguments, frozenset(range(layout.num_layers))), []
    if granularity != "full":
        raise EvenloadError(
            f"--recompute-granularity is {granularity!r}",
            where=arguments.where("--recompute-granularity"),
            fix="use full or selective",
        )
    _refuse_with(arguments, "full", "--recompute-modules")
    return _full(arguments, layout)


def _full(arguments: Arguments, layout: Layout) -> tuple[Policy, list[Notice]]:
    sliced = arguments.flag("--distribute-saved-activations")
    method = arguments.word("--recompute-method")
    size = _positive(arguments, "--recompute-num-layers", 1)
    where = arguments.where("--recompute-num-layers")
    if method == "block":
        full = first_layers(tuple((size,) * layout.pp for _ in range(layout.interleave)), layout)
        return Policy(full=full, slice_activation=sliced), []
    if method != "uniform":
        raise EvenloadError(
            f"--recompute-granularity full with --recompute-method {method}",
            where=arguments.where("--recompute-method"),
            fix="use uniform (units over all layers) or block (the first n layers of every chunk)",
        )
    notices: list[Notice] = []
    if size > 1:
        units = "+".join(str(len(unit)) for unit in uniform_units(max(map(max, layout.table)), size))
        notices.append(
            Notice(
                fact=f"uniform units of {size} layers ({units} in the largest chunk) keep one input per unit; "
                "the plan recomputes every layer on its own and keeps one input per layer",
                where=where,
                fix="for the plan as it is read, use --recompute-num-layers 1",
            )
        )
    return Policy(full=frozenset(range(layout.num_layers)), slice_activation=sliced), notices


def _selective(arguments: Arguments, everywhere: Layers) -> Policy:
    modules = arguments.words("--recompute-modules") or ("core_attn",)
    select: dict[str, Layers] = {}
    for module in modules:
        if module not in MODULES:
            raise EvenloadError(
                f"--recompute-modules names {module!r}",
                where=arguments.where("--recompute-modules"),
                fix=did_you_mean(module, list(MODULES)) or f"evenload knows {', '.join(MODULES)}",
            )
        select |= dict.fromkeys(MODULES[module], everywhere)
    return Policy(select=select)


def _refuse_with(arguments: Arguments, granularity: str, *names: str) -> None:
    for name in names:
        if arguments.flag(name):
            raise EvenloadError(
                f"{name} says nothing with --recompute-granularity {granularity}", where=arguments.where(name)
            )


def _refuse_without(arguments: Arguments, needed: str, *names: str) -> None:
    for name in names:
        if arguments.flag(name):
            raise EvenloadError(
                f"{name} says nothing without {needed}", where=arguments.where(name), fix=f"add {needed}"
            )


def _positive(arguments: Arguments, name: str, absent: int) -> int:
    value = arguments.number(name, absent) or 0
    if not 1 <= value <= _MOST:
        raise EvenloadError(f"{name} is {value}", where=arguments.where(name), fix=f"give 1 to {_MOST}")
    return value


def _said(counted: int, num_layers: int) -> str:
    extra = counted - num_layers
    return f"{num_layers} layers" + (f" and {extra} counted as layers" if extra else "")


def _chunks(pp: int, interleave: int) -> str:
    return f"{pp} stages" + (f" x {interleave} chunks" if interleave > 1 else "")


def _use_layout(num_layers: int, pp: int, interleave: int) -> str:
    layout = Layout.even(num_layers, pp=pp, interleave=interleave)
    return f"use {_LAYOUT} '{write_layout_string(layout)}', or layers that divide"
