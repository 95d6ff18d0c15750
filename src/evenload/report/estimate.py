"""An estimate, stage by stage and line by line: as a value, as JSON and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.plan import Plan
from evenload.plan.policy import LayerPolicy, Recompute
from evenload.profile.profile import Line, Origin, Profile
from evenload.report.table import columns
from evenload.simulate.memory import RankMemory
from evenload.simulate.timeline import Timeline
from evenload.units import GIB, gib, plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One contribution to a stage's memory."""

    line: Line
    name: str
    """Whose memory it is, in words."""
    nbytes: float
    origin: Origin


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What one stage holds at its peak."""

    memory: RankMemory
    layers: tuple[int, ...]
    """Numbers of its layers."""
    parts: tuple[Part, ...]
    """Everything, largest first; without those outside the allocator they sum to the peak."""

    @property
    def largest(self) -> tuple[Part, ...]:
        """The three largest contributions."""
        return self.parts[:3]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Memory of every stage of a plan."""

    stages: tuple[Stage, ...]
    limit: int | None = None
    """Bytes of one device, where somebody named them."""

    @property
    def fullest(self) -> Stage:
        """The stage that needs most: it binds."""
        return max(self.stages, key=lambda stage: stage.memory.needed)

    @property
    def fits(self) -> bool | None:
        """Whether peak and outside memory stay within the limit on every stage; None without a limit."""
        return None if self.limit is None else self.fullest.memory.needed <= self.limit


def estimate(profile: Profile, plan: Plan, timeline: Timeline, limit: int | None = None) -> Estimate:
    """The memory of a simulated plan, with whose memory it is."""
    return Estimate(
        stages=tuple(_stage(profile, plan, memory) for memory in timeline.memory),
        limit=limit,
    )


def _stage(profile: Profile, plan: Plan, memory: RankMemory) -> Stage:
    stage = memory.rank
    layers = tuple(layer for chunk in range(plan.layout.interleave) for layer in plan.layout.layers(chunk, stage))
    held = _held(profile, plan, stage)
    parts = [*_static(profile, held, memory), *_kept(profile, held, memory)]
    parts.append(_transient(profile, held, memory))
    parts += _buffers(profile, held, memory)
    parts += _named(Line.OUTSIDE, profile.outside_parts or {"outside the allocator": memory.outside})
    return Stage(
        memory=memory,
        layers=layers,
        parts=tuple(sorted((part for part in parts if part.nbytes), key=lambda part: -part.nbytes)),
    )


_Held = list[tuple[int, str, LayerPolicy]]
"""Every layer of a stage, the ends included: (chunk, kind, policy)."""


def _held(profile: Profile, plan: Plan, stage: int) -> _Held:
    held: _Held = []
    for chunk in range(plan.layout.interleave):
        if chunk == 0 and stage == 0:
            held += [(chunk, kind, LayerPolicy()) for kind in profile.first]
        held += [(chunk, profile.blocks[layer], plan.for_layer(layer)) for layer in plan.layout.layers(chunk, stage)]
        if chunk == plan.layout.interleave - 1 and stage == plan.layout.pp - 1:
            held += [(chunk, kind, LayerPolicy()) for kind in profile.last]
    return held


def _static(profile: Profile, held: _Held, memory: RankMemory) -> list[Part]:
    """What is held by kind; of gradients those that are there at the peak."""
    counts = Counter(kind for _, kind, _ in held)
    whole = sum(count * profile.kind(kind).gradients for kind, count in counts.items())
    there = memory.gradients / whole if whole else 0.0
    return [
        Part(
            line=line,
            name=f"{line} of {_layers(counts[kind], kind)}",
            nbytes=counts[kind] * getattr(profile.kind(kind), line) * (there if line is Line.GRADIENTS else 1.0),
            origin="given" if profile.origin == "given" else "exact",
        )
        for line in (Line.PARAMETERS, Line.GRADIENTS, Line.OPTIMIZER)
        for kind in counts
    ]


def _kept(profile: Profile, held: _Held, memory: RankMemory) -> list[Part]:
    """What is kept, by kind and recompute choice, over the micro-batches in flight at the peak."""
    nbytes: dict[tuple[str, Recompute, int], float] = {}
    counts = Counter((kind, policy.choice, memory.in_flight[chunk]) for chunk, kind, policy in held)
    for chunk, kind, policy in held:
        key = (kind, policy.choice, memory.in_flight[chunk])
        nbytes[key] = nbytes.get(key, 0.0) + profile.kind(kind).cost(policy).kept * key[2]
    total = sum(nbytes.values())
    share = memory.kept / total if total else 0.0  # below 1 only where the running action has freed some of it
    return [
        Part(
            line=Line.KEPT,
            name=f"kept by {_layers(counts[key], key[0])}"
            + ("" if key[1] is Recompute.NONE else f" (recompute {key[1]})")
            + f" x {plural(key[2], 'micro-batch', 'micro-batches')}",
            nbytes=kept * share,
            origin=profile.origin,
        )
        for key, kept in nbytes.items()
    ]


def _transient(profile: Profile, held: _Held, memory: RankMemory) -> Part:
    """Working memory at the peak, and the kind of layer that runs then."""
    where = ""
    direction, _, chunk = memory.running.partition(" of chunk ")
    if chunk:
        level, highest = 0.0, -1.0
        running = [(kind, policy) for its, kind, policy in held if its == int(chunk)]
        for kind, policy in running if direction == "forward" else reversed(running):
            cost = profile.kind(kind).cost(policy)
            segment = cost.forward if direction == "forward" else cost.backward
            if level + segment.peak > highest:
                where, highest = f" of {kind}", level + segment.peak
            level += segment.net
    name = f"working memory of the {direction}{where}"
    return Part(line=Line.TRANSIENT, name=name, nbytes=memory.transient, origin="modelled")


def _buffers(profile: Profile, held: _Held, memory: RankMemory) -> list[Part]:
    of_layers = sum(profile.kind(kind).buffers for _, kind, _ in held)
    rest = memory.buffers - of_layers
    parts: Mapping[str, float] = profile.buffer_parts(memory.rank) if profile.buffer_parts else {"buffers": rest}
    named = _named(Line.BUFFERS, {"gathered parameters and gradient buckets of the layers": of_layers, **parts})
    return [
        *named,
        Part(line=Line.BUFFERS, name="constant of every stage", nbytes=memory.constant, origin=profile.origin),
    ]


def _named(line: Line, parts: Mapping[str, float]) -> list[Part]:
    return [Part(line=line, name=name, nbytes=nbytes, origin="modelled") for name, nbytes in parts.items()]


def as_json(estimate: Estimate) -> dict[str, Any]:
    """The estimate as plain values, in bytes."""
    return {
        "stages": [_stage_json(stage) for stage in estimate.stages],
        "limit": estimate.limit,
        "fits": estimate.fits,
    }


def _stage_json(stage: Stage) -> dict[str, Any]:
    memory = stage.memory
    return {
        "rank": memory.rank,
        "layers": len(stage.layers),
        "layer_ids": stage.layers,
        "parameters": round(memory.parameters),
        "gradients": round(memory.gradients),
        "optimizer": round(memory.optimizer),
        "static": round(memory.static),
        "kept": round(memory.kept),
        "transient": round(memory.transient),
        "buffers": round(memory.buffers + memory.constant),
        "outside": round(memory.outside),
        "peak_allocated": round(memory.peak_allocated),
        "peak_reserved": None,
        "needed": round(memory.needed),
        "in_flight": memory.in_flight,
        "at_peak": memory.running,
        "lines": [
            {"name": part.name, "line": part.line, "bytes": round(part.nbytes), "origin": part.origin}
            for part in stage.parts
        ],
    }


def as_text(estimate: Estimate, heading: str) -> str:
    """The estimate for the screen: a table of the stages, what binds, and the verdict. GiB is 2**30 bytes."""
    head = ("stage", "layers", "in flight", *(line.value for line in Line), "peak", "needed")
    head += ("margin",) if estimate.limit is not None else ()
    rows = [_row(stage, estimate.limit) for stage in estimate.stages]
    fullest = estimate.fullest
    lines = [
        heading,
        "",
        columns(head, rows),
        "",
        "GiB = 2**30 bytes; needed = peak inside the allocator + outside it",
        "",
        f"stage {fullest.memory.rank} needs most, in the {fullest.memory.running}; its largest parts:",
        *(f"  {gib(part.nbytes):>12}  {part.name} ({part.origin})" for part in fullest.largest),
        "",
        _verdict(estimate),
    ]
    return "\n".join(lines)


def _row(stage: Stage, limit: int | None) -> tuple[str, ...]:
    memory = stage.memory
    lines = memory.lines | {Line.BUFFERS.value: memory.buffers + memory.constant}
    sizes = [*(lines[line.value] for line in Line), memory.peak_allocated, memory.needed]
    if limit is not None:
        sizes.append(limit - memory.needed)
    return (
        str(memory.rank),
        layer_ranges(stage.layers),
        "+".join(map(str, memory.in_flight)),
        *(f"{size / GIB:.2f}" for size in sizes),
    )


def _verdict(estimate: Estimate) -> str:
    needed, rank = estimate.fullest.memory.needed, estimate.fullest.memory.rank
    if estimate.limit is None:
        return f"no limit given: stage {rank} needs {gib(needed)}, the most of all"
    if estimate.fits:
        return f"fits in {gib(estimate.limit)}: {gib(estimate.limit - needed)} are free on the fullest stage"
    over = sum(stage.memory.needed > estimate.limit for stage in estimate.stages)
    return (
        f"does not fit in {gib(estimate.limit)}: stage {rank} needs {gib(needed)}, {gib(needed - estimate.limit)} too "
        f"much ({over} of {plural(len(estimate.stages), 'stage is', 'stages are')} over)"
    )


def _layers(count: int, kind: str) -> str:
    return kind if count == 1 else f"{count} {kind} layers"
