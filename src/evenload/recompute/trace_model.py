"""Traces a model for a profile: the operators of its forward, and the ledger of its steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import nn

from evenload.ledger.ledger import ALIVE, Ledger
from evenload.ledger.words import Category, MarkKind
from evenload.plan.operators import Graph
from evenload.plan.operators import Value as GraphValue
from evenload.profile.traced import FIRST, LAST, Held, LayerMemory, StepMemory, TracedModel
from evenload.recompute._torch_private import storage_key
from evenload.recompute.step_graphs import StepGraphs, step_graphs
from evenload.record.failures import explained
from evenload.record.layers import Layers, find_layers, only
from evenload.record.pieces import below
from evenload.record.rehearsal import Rehearsal
from evenload.record.runs import Prepared, record_steps
from evenload.record.step_segments import StepSegments, step_segments
from evenload.record.substitutes import substituted_in_libraries
from evenload.record.targets import find_target
from evenload.setup import DType
from evenload.simulate.composition import Reduction, reduction

_DTYPES: Final[Mapping[torch.dtype, DType]] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_STEPS: Final = 2
"""The second step is what later ones are like."""
Prepare = Callable[[Rehearsal], Prepared]
Place = Callable[[], Rehearsal]


def trace_model(
    prepare: Prepare, *, name: str = "model", device: str = "cuda", layers: str | None = None
) -> TracedModel:
    """Trace a model in a dry run.

    Args:
        prepare: builds what is trained; see `evenload.record.dryrun.preparing`. With two micro-batches or more
            gradients are added up, as in a pipeline.
        name: what to call it.
        device: the device that the run is for.
        layers: module path of the list of repeated layers; None: the largest, see `find_layers`.

    Raises:
        EvenloadError: there are no repeated layers, they do not run one after the other, or the code that runs fails.
    """
    target = find_target(device)

    def place() -> Rehearsal:
        return Rehearsal(target)

    ledger = record_steps(place, prepare, steps=_STEPS, full=False, layers=layers)
    few = any(mark.kind is MarkKind.NOTE for mark in ledger.marks)
    structure = _structure(place, prepare, layers, few=few)
    passed = structure.passed
    segments = step_segments(
        ledger,
        structure.path,
        layers=len(structure.kinds),
        entering=[value.nbytes for value in passed],
        gradients=[value.nbytes if value.differentiable else 0 for value in passed],
        shared={one.nbytes for one in structure.tensors if one.tied and one.trained},
    )
    positions = {kind: middle(structure.kinds, kind) + 1 for kind in dict.fromkeys(structure.kinds)}
    positions = {FIRST: 0, **positions, LAST: len(structure.kinds) + 1}
    states = _states(ledger)
    return TracedModel(
        name=name,
        path=structure.path,
        kinds=structure.kinds,
        graphs={FIRST: structure.first, **structure.graphs, LAST: structure.last},
        memory={kind: _memory(segments, at) for kind, at in positions.items()},
        held={kind: _held(structure.tensors, states, at) for kind, at in positions.items()},
        tied=_held([one for one in structure.tensors if one.tied], states, 0),
        step=StepMemory(
            resident=segments.resident,
            optimizer_transient=segments.optimizer_transient,
            optimizer_loops=segments.optimizer_loops,
            recomputes=segments.recomputes,
            accumulates=segments.accumulates,
        ),
        boundary=max(value.nbytes for value in passed),
        dtype=structure.dtype,
        device=target.kind,
        notes=_notes(structure, segments),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """A parameter or buffer."""

    part: int
    """0: before the layers; 1 + number of the layer; one more than the last: after them."""
    module: str
    """Path of the module that owns it."""
    nbytes: int
    count: int
    """Elements, where it is a parameter."""
    trained: bool
    tied: bool = False
    """Used after the layers too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Structure:
    """What a model is made of."""

    path: str
    kinds: tuple[str, ...]
    first: Graph
    graphs: Mapping[str, Graph]
    """Kind -> operators."""
    last: Graph
    passed: tuple[GraphValue, ...]
    """What goes into every layer and out of the last."""
    besides: tuple[str, ...]
    tensors: tuple[_Tensor, ...]
    dtype: DType


def _structure(place: Place, prepare: Prepare, layers: str | None, *, few: bool) -> _Structure:
    """Record one forward: of few layers where that is enough, else of all."""
    try:
        return _recorded(place, prepare, layers, few=few)
    except _UnlikeError:
        return _recorded(place, prepare, layers, few=False)


class _UnlikeError(Exception):
    """Few layers do not stand for all."""


def _recorded(place: Place, prepare: Prepare, layers: str | None, *, few: bool) -> _Structure:
    with place() as rehearsal, explained(rehearsal):
        prepared = prepare(rehearsal)
        model = prepared.model
        found = find_layers(model, layers)
        reduced = reduction(found.kinds if few else range(len(found)))
        with substituted_in_libraries(rehearsal.target), only(model, found, reduced.traced):
            optimizer = prepared.optimizer(model) if prepared.training.own is not None else None
            step = partial(prepared.training.step, model, optimizer)
            graphs = step_graphs(model, step, found.path, len(reduced.traced))
        if any(_signature(graphs, one) != _signature(graphs, other) for one, other in reduced.twins):
            raise _UnlikeError
        kinds = _kinds(found, graphs, reduced)
        return _Structure(
            path=found.path,
            kinds=kinds,
            first=graphs.first,
            graphs={kind: graphs.layers[reduced.source[middle(kinds, kind)]] for kind in dict.fromkeys(kinds)},
            last=graphs.last,
            passed=(*(graphs.boundaries[at] for at in reduced.source), graphs.boundaries[-1]),
            besides=graphs.besides,
            tensors=tuple(_tensors(model, found, graphs)),
            dtype=_dtype(prepared, found),
        )


def _signature(graphs: StepGraphs, at: int) -> tuple[object, ...]:
    """What tells layers of different kinds apart."""
    graph = graphs.layers[at]
    return (
        graph.nbytes(graph.input),
        *(
            (operator.label, operator.flops, operator.weight_bytes, *map(graph.nbytes, operator.outputs))
            for operator in graph.operators[: graphs.inside[at]]
        ),
    )


def _kinds(found: Layers, graphs: StepGraphs, reduced: Reduction) -> tuple[str, ...]:
    """Name of the kind of every layer: its class, and the first such layer where there are several kinds of it."""
    names = [type(layer).__name__ for layer in found.modules]
    keys = list(zip(found.kinds, (_signature(graphs, at) for at in reduced.source), strict=True))
    first = [keys.index(key) for key in keys]
    several = {name for name in names if len({first[i] for i, one in enumerate(names) if one == name}) > 1}
    return tuple(
        f"{name} like layer {number}" if name in several else name for name, number in zip(names, first, strict=True)
    )


def middle(kinds: Sequence[str], kind: str) -> int:
    """A layer that stands for its kind: one between two of the same, in the middle, where there is such a one."""
    mine = [i for i, one in enumerate(kinds) if one == kind]
    inner = [i for i in mine if 0 < i < len(kinds) - 1 and kinds[i - 1] == kind == kinds[i + 1]]
    return (inner or mine)[len(inner or mine) // 2]


def _tensors(model: nn.Module, found: Layers, graphs: StepGraphs) -> Iterator[_Tensor]:
    """All parameters and buffers, each storage once."""
    layer = re.compile(rf"{re.escape(below(found.path))}(\d+)\.")
    early, late = ({value.name for value in graph.values if value.held} for graph in (graphs.first, graphs.last))
    seen: set[int] = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if storage_key(tensor) in seen:
            continue
        seen.add(storage_key(tensor))
        inside = layer.match(name)
        after = name in late
        own = isinstance(tensor, nn.Parameter) or tensor.requires_grad
        yield _Tensor(
            part=int(inside[1]) + 1 if inside else (len(found) + 1 if after and name not in early else 0),
            module=name.rpartition(".")[0],
            nbytes=tensor.untyped_storage().nbytes(),
            count=tensor.numel() if own else 0,
            trained=tensor.requires_grad,
            tied=not inside and after and name in early,
        )


def _states(ledger: Ledger) -> Mapping[str, int]:
    """Module -> bytes on the device that the optimizer holds for its parameters."""
    rows = ledger.allocations
    states = (rows.category == Category.OPTIMIZER.code) & ledger.on_device & (rows.freed == ALIVE)
    held: Counter[str] = Counter()
    for row in np.flatnonzero(states).tolist():
        held[ledger.module(row) or ""] += int(rows.nbytes[row])
    return held


def _held(tensors: Iterable[_Tensor], states: Mapping[str, int], part: int) -> Held:
    """What a part holds; states of an optimizer follow the trained parameters of their module."""
    tensors = list(tensors)
    trained: Counter[str] = Counter()
    for one in tensors:
        trained[one.module] += one.nbytes * one.trained
    mine = [one for one in tensors if one.part == part]
    return Held(
        count=sum(one.count for one in mine),
        parameters=sum(one.nbytes for one in mine),
        gradients=sum(one.nbytes for one in mine if one.trained),
        optimizer=round(
            sum(states.get(one.module, 0) * one.nbytes / trained[one.module] for one in mine if one.trained)
        ),
    )


def _memory(segments: StepSegments, part: int) -> LayerMemory:
    """What a part does to memory."""
    first = segments.first_backward
    return LayerMemory(
        forward=segments.forward[part],
        backward=segments.backward[part],
        first_backward=None if first is None else first[part],
    )


def _dtype(prepared: Prepared, found: Layers) -> DType:
    """Type of the matrix products: that of autocast, else of most of the layers' parameters."""
    if prepared.training.autocast is not None:
        return _DTYPES.get(prepared.training.autocast, "fp32")
    sizes: Counter[torch.dtype] = Counter()
    for parameter in found.container.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return _DTYPES.get(max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32), "fp32")


def _notes(structure: _Structure, segments: StepSegments) -> tuple[str, ...]:
    """What the profile assumes."""
    holder = structure.path or "the model itself"
    notes = [
        f"Traced: the layers are those of {holder}; memory without recomputation is the dry run's.",
        "What recomputation changes follows from the layer's operators.",
    ]
    if segments.recomputes:
        notes.append("The model checkpoints by its own code, which stays; nothing else is chosen for its layers.")
    if structure.besides:
        one, *others = structure.besides
        more = f" and {len(others)} more" if others else ""
        notes.append(
            f"Stages would also have to send {one}{more}, which is not counted: a layer reads it from "
            "another than the one before."
        )
    if any(one.tied for one in structure.tensors):
        notes.append("A parameter is used before and after the layers; with several stages both ends hold a copy.")
    return tuple(notes)
