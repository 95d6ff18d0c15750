"""The `Profile` value: what one layer of each kind costs under a setup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Literal

from evenload.plan.operators import Graph
from evenload.plan.policy import LayerPolicy, Recompute

Origin = Literal["exact", "modelled", "given", "traced", "measured"]
"""How a number came about."""


class Line(StrEnum):
    """The memory lines: the same words in profiles, timelines, ledgers and reports."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    KEPT = "kept"
    TRANSIENT = "transient"
    BUFFERS = "buffers"
    OUTSIDE = "outside"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Memory events of one action on one layer: signed changes in order of time."""

    events: tuple[float, ...] = ()

    @cached_property
    def net(self) -> float:
        """What is left when it ends."""
        return sum(self.events)

    @cached_property
    def peak(self) -> float:
        """The highest point above the start, at least 0."""
        level = peak = 0.0
        for change in self.events:
            level += change
            peak = max(peak, level)
        return peak


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One layer under one recompute policy, for one micro-batch."""

    forward_time: float
    backward_time: float
    """Backward including what is recomputed."""
    recompute_time: float = 0.0
    """The part of `backward_time` that recomputation takes."""
    forward: Segment
    """Ends at what the layer keeps for backward."""
    backward: Segment
    """Ends at minus what the layer kept."""
    first_backward: Segment | None = None
    """The first backward of a step where gradients come to be in it: ends at the layer's gradients minus what it kept.
    None: the rank holds them all the time."""

    @property
    def kept(self) -> float:
        """What forward leaves alive for backward."""
        return self.forward.net

    @property
    def first(self) -> Segment:
        """The first backward of a step."""
        return self.first_backward or self.backward

    @property
    def born(self) -> float:
        """Gradients that come to be in the first backward of a step; they are there until the optimizer has run."""
        return 0.0 if self.first_backward is None else self.first_backward.net - self.backward.net


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """What one layer of one kind costs on one rank."""

    kind: str
    parameters: float
    """Memory of the parameters on one rank."""
    gradients: float
    optimizer: float
    """Optimizer states and main copies on one rank."""
    buffers: float = 0.0
    """Memory the layer adds to the rank's buffers all through the step: gathered parameters, gradient buckets."""
    count: int = 0
    """Number of parameters (elements) on one rank."""
    update_time: float = 0.0
    """Time of the optimizer for the layer's parameters, once a step; 0: not known."""
    cost: Callable[[LayerPolicy], Cost]
    """Cost under a policy; cached by the maker."""
    graph: Graph | None = None
    """The operators, where the profile knows them."""
    choices: tuple[Recompute, ...] = tuple(Recompute)
    """Recompute choices that this kind has a cost for; a given table may lack some."""

    @property
    def static(self) -> float:
        """Parameters + gradients + optimizer."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What the layers of a model cost under a setup.

    Memory is in bytes, time in seconds, unless `memory_unit` and `time_unit` say otherwise (a given table).
    """

    layers: Mapping[str, LayerProfile]
    """Kind -> costs."""
    blocks: tuple[str, ...]
    """Kind of every block in order: these are the layers that a layout counts."""
    first: tuple[str, ...] = ()
    """Kinds that come before the blocks on the first stage (embedding)."""
    last: tuple[str, ...] = ()
    """Kinds that come after the blocks on the last stage (MTP layers, head)."""
    constant: float = 0.0
    """Memory every rank holds whatever its layers: counted inside the peak (a table's stage constant)."""
    outside: float = 0.0
    """Memory outside the allocator: context, collectives' buffers, workspaces. Never inside the peak."""
    boundary: float = 0.0
    """Bytes sent from one chunk to the next per micro-batch."""
    transfer_time: float = 0.0
    """Time to send `boundary` from one stage to the next."""
    chunk_forward: float = 0.0
    """Time that a forward of a chunk takes beside its layers; 0: not known."""
    chunk_backward: float = 0.0
    """Likewise of a backward."""
    buffers: Callable[[int, int], float] | None = None
    """(stage, layers held) -> memory of buffers on that rank beside those of its layers; None: none."""
    buffer_parts: Callable[[int], Mapping[str, float]] | None = None
    """Stage -> what `buffers` is made of, by name; None: nobody knows."""
    outside_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """What `outside` is made of, by name."""
    optimizer_transient: Callable[[float], float] | None = None
    """Parameters on the rank (bytes) -> transient memory of the optimizer step; None: none."""
    memory_unit: str = "bytes"
    time_unit: str = "seconds"
    origin: Origin = "modelled"
    notes: tuple[str, ...] = field(default=())
    """What the profile leaves out or assumes, one sentence each."""

    def kind(self, name: str) -> LayerProfile:
        """Costs of a kind."""
        return self.layers[name]
