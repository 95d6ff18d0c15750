"""What every chunk of a plan costs: the layers of a profile added up, in the order they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.errors import EvenloadError
from evenload.plan.plan import Plan
from evenload.plan.policy import LayerPolicy
from evenload.profile.profile import Cost, LayerProfile, Profile, Segment

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkCosts:
    """Costs of every chunk for one micro-batch, and what every stage holds all the time.

    Memory and time are in the units of the profile. Frameworks with a buffer for gradients hold them always; in others
    those of a chunk come to be in the first backward of a step, and are there until the optimizer has run (`born`).
    """

    forward: Floats
    """[chunk, stage]: forward time."""
    backward: Floats
    """[chunk, stage]: backward time, what is recomputed included."""
    recompute: Floats
    """[chunk, stage]: the part of `backward` that recomputation takes."""
    kept: Floats
    """[chunk, stage]: what one micro-batch keeps from its forward to its backward."""
    forward_peak: Floats
    """[chunk, stage]: highest point of a forward above its start, at least `kept`."""
    backward_peak: Floats
    """[chunk, stage]: highest point of a backward above its start, at least 0."""
    first_backward_peak: Floats
    """[chunk, stage]: that of the first backward of a step."""
    first_born: Floats
    """[chunk, stage]: gradients that are there when the layer begins in which the first backward has that point."""
    born: Floats
    """[chunk, stage]: gradients that come to be in the first backward of a step; a part of `gradients`."""
    parameters: Floats
    """[stage]."""
    gradients: Floats
    """[stage]."""
    optimizer: Floats
    """[stage]: optimizer states and main copies."""
    constant: Floats
    """[stage]: memory inside the peak that belongs to no layer (a table's stage constant)."""
    buffers: Floats
    """[stage]: pipeline buffers, gathers, buckets."""
    outside: Floats
    """[stage]: memory outside the allocator, never inside the peak."""
    optimizer_transient: Floats
    """[stage]: working memory of the optimizer step, when nothing is in flight."""
    update: Floats
    """[stage]: time of the optimizer, once a step."""

    @property
    def interleave(self) -> int:
        """Chunks per stage."""
        return self.forward.shape[0]

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.forward.shape[1]

    @property
    def static(self) -> Floats:
        """[stage]: parameters + gradients + optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def base(self) -> Floats:
        """[stage]: what a rank holds all through the step: static + constant + buffers, but for what is born in it."""
        return self.static - self.born.sum(axis=0) + self.constant + self.buffers

    @property
    def births(self) -> bool:
        """Whether gradients come to be in the step."""
        return bool(self.born.any())

    @classmethod
    def of_tables(
        cls,
        forward: ArrayLike,
        *,
        backward: ArrayLike | None = None,
        recompute: ArrayLike = 0.0,
        kept: ArrayLike = 0.0,
        static: ArrayLike = 0.0,
        constant: float = 0.0,
    ) -> ChunkCosts:
        """Costs known by chunk rather than by layer, [chunk][stage]; static memory is not divided into lines.

        Args:
            forward: forward times.
            backward: backward times with what is recomputed; None: twice the forward, plus `recompute`.
            recompute: the part of the backward times that recomputation takes.
            kept: what one micro-batch keeps.
            static: what every stage holds always, [stage].
            constant: what every stage holds beside that.
        """
        times = np.array(forward, dtype=np.float64)
        if times.ndim != 2 or not times.size:
            raise EvenloadError(f"forward times have the shape {list(times.shape)}", where="$.forward")
        again = _like(times, recompute)
        return cls(
            forward=times,
            backward=2 * times + again if backward is None else _like(times, backward),
            recompute=again,
            kept=_like(times, kept),
            forward_peak=_like(times, kept),
            backward_peak=_like(times, 0.0),
            first_backward_peak=_like(times, 0.0),
            first_born=_like(times, 0.0),
            born=_like(times, 0.0),
            parameters=_like(times[0], static),
            gradients=_like(times[0], 0.0),
            optimizer=_like(times[0], 0.0),
            constant=_like(times[0], constant),
            buffers=_like(times[0], 0.0),
            outside=_like(times[0], 0.0),
            optimizer_transient=_like(times[0], 0.0),
            update=_like(times[0], 0.0),
        )


def chunk_costs(profile: Profile, plan: Plan) -> ChunkCosts:
    """Add up the layers of every chunk.

    The kinds before the blocks (embedding) run in the first chunk of the first stage, the kinds after them (MTP layers,
    head) in the last chunk of the last stage. A forward runs its layers in order, a backward in reverse; the peak of a
    chunk is the highest point of that sequence.

    Raises:
        EvenloadError: the plan holds another number of layers than the profile, or asks for a recompute choice that
            the profile has no cost for.
    """
    layout = plan.layout
    if layout.num_layers != len(profile.blocks):
        raise EvenloadError(
            f"the plan places {layout.num_layers} layers, the model has {len(profile.blocks)}",
            where="$.layout",
            fix="make the layers of all chunks sum to the layers of the model",
        )
    shape = (layout.interleave, layout.pp)
    table = np.zeros((len(_Sums._fields), *shape))
    held = np.zeros((5, layout.pp))
    cost_of = _Costs(profile)
    for chunk, stage, layers in layout.chunks():
        of_chunk = [cost_of(profile.blocks[layer], plan.for_layer(layer)) for layer in layers]
        kinds = [profile.blocks[layer] for layer in layers]
        if chunk == 0 and stage == 0:
            of_chunk[:0] = [cost_of(kind, LayerPolicy()) for kind in profile.first]
            kinds[:0] = profile.first
        if chunk == layout.interleave - 1 and stage == layout.pp - 1:
            of_chunk += [cost_of(kind, LayerPolicy()) for kind in profile.last]
            kinds += profile.last
        table[:, chunk, stage] = _add_up(of_chunk)
        held[:, stage] += _held(map(profile.kind, kinds))
    sums = dict(zip(_Sums._fields, table, strict=True))
    sums["forward"] = sums["forward"] + profile.chunk_forward
    sums["backward"] = sums["backward"] + profile.chunk_backward
    parameters, gradients, optimizer, buffers, update = held
    return ChunkCosts(
        **sums,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        constant=np.full(layout.pp, float(profile.constant)),
        buffers=buffers + _stage_buffers(profile, plan),
        outside=np.full(layout.pp, float(profile.outside)),
        optimizer_transient=_optimizer_transient(profile, parameters),
        update=update,
    )


class _Sums(NamedTuple):
    """One chunk, added up; the fields of `ChunkCosts` in order."""

    forward: float
    backward: float
    recompute: float
    kept: float
    forward_peak: float
    backward_peak: float
    first_backward_peak: float
    first_born: float
    born: float


class _Costs:
    """Cost of a kind under a policy; layers of one kind mostly share their policy, so each is asked for once."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._known: dict[tuple[str, LayerPolicy], Cost] = {}

    def __call__(self, kind: str, policy: LayerPolicy) -> Cost:
        key = (kind, policy)
        if key not in self._known:
            self._known[key] = self._profile.kind(kind).cost(policy)
        return self._known[key]


def _add_up(costs: list[Cost]) -> _Sums:
    first_peak, first_born = _first_backward(costs)
    return _Sums(
        forward=sum(cost.forward_time for cost in costs),
        backward=sum(cost.backward_time for cost in costs),
        recompute=sum(cost.recompute_time for cost in costs),
        kept=sum(cost.kept for cost in costs),
        forward_peak=_highest(cost.forward for cost in costs),
        backward_peak=_highest(cost.backward for cost in reversed(costs)),
        first_backward_peak=first_peak,
        first_born=first_born,
        born=sum(cost.born for cost in costs),
    )


def _first_backward(costs: list[Cost]) -> tuple[float, float]:
    """(highest point of the first backward above its start, gradients that are there when its layer begins)."""
    level = peak = born = at_peak = 0.0
    for cost in reversed(costs):
        if level + cost.first.peak > peak:
            peak, at_peak = level + cost.first.peak, born
        level += cost.first.net
        born += cost.born
    return peak, at_peak


def _highest(segments: Iterable[Segment]) -> float:
    """Highest point of segments that run one after the other, above the start of the first."""
    level = peak = 0.0
    for segment in segments:
        peak = max(peak, level + segment.peak)
        level += segment.net
    return peak


def _held(layers: Iterable[LayerProfile]) -> Floats:
    """Parameters, gradients, optimizer, buffers and update time of some layers."""
    sums = np.zeros(5)
    for layer in layers:
        sums += (layer.parameters, layer.gradients, layer.optimizer, layer.buffers, layer.update_time)
    return sums


def _stage_buffers(profile: Profile, plan: Plan) -> Floats:
    if profile.buffers is None:
        return np.zeros(plan.layout.pp)
    return np.array([profile.buffers(stage, held) for stage, held in enumerate(plan.layout.per_stage)], dtype=float)


def _optimizer_transient(profile: Profile, parameters: Floats) -> Floats:
    if profile.optimizer_transient is None:
        return np.zeros(len(parameters))
    return np.array([profile.optimizer_transient(held) for held in _floats(parameters)], dtype=float)


def _floats(array: Floats) -> Iterator[float]:
    yield from array.tolist()


def _like(shape: Floats, values: ArrayLike) -> Floats:
    """Values as an array of the same shape; a single number is repeated."""
    array = np.array(values, dtype=np.float64)
    if array.ndim and array.shape != shape.shape:
        raise EvenloadError(f"a table has the shape {list(array.shape)}, the forward times {list(shape.shape)}")
    return np.broadcast_to(array, shape.shape).copy()
