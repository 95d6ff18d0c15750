"""The planning problem: layers in order, chunks in order, a limit on every rank, and the graph that times a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout, Table
from evenload.plan.plan import Plan
from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT, Policy
from evenload.planner.costs import (
    BOTH,
    CHOICES,
    COMM,
    FULL,
    SELECT,
    EndCosts,
    Floats,
    Ints,
    KindCosts,
    choice_policies,
    kind_costs,
)
from evenload.profile.profile import Profile
from evenload.setup import Setup
from evenload.simulate.graph import ActionGraph
from evenload.simulate.inflight import InFlight

MOST_LAYERS: Final = 1024
"""More layers than any model has; the options of a chunk grow with them."""

Counts = tuple[int, ...]
"""Layers of every chunk in layer order: entry `chunk * pp + stage`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What `solve` decides about, in numbers."""

    profile: Profile
    setup: Setup
    limit: float
    """Memory of one rank, in the profile's unit."""
    select: tuple[str, ...] = DEFAULT_SELECT
    """Patterns behind the choice `select`."""
    comm: tuple[str, ...] = DEFAULT_COMM
    """Patterns behind the choice `comm`."""
    switches: Policy = field(default_factory=Policy)
    """Whose switches for the whole run a plan takes over (`mp_comm` and its like)."""

    def __post_init__(self) -> None:
        if not _is_size(self.limit):
            raise EvenloadError(f"the memory limit is {self.limit!r}", where="$.memory", fix="give a size above zero")
        layers = len(self.profile.blocks)
        if layers > MOST_LAYERS:
            raise EvenloadError(
                f"the planner takes up to {MOST_LAYERS} layers, the model has {layers}", where="$.layers"
            )
        if layers < sum(self.least):
            raise EvenloadError(
                f"pp {self.pp} x interleave {self.interleave} needs at least {sum(self.least)} layers, "
                f"the model has {layers}",
                where="$.pp",
                fix="lower pp or interleave",
            )

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.setup.pp

    @property
    def interleave(self) -> int:
        """Chunks per stage."""
        return self.setup.interleave

    @property
    def chunks(self) -> int:
        """Chunks of the whole pipeline."""
        return self.setup.chunks

    @cached_property
    def graph(self) -> ActionGraph:
        """The schedule, ready to be timed."""
        setup = self.setup
        return ActionGraph.scheduled(
            setup.schedule, pp=setup.pp, interleave=setup.interleave, micro_batches=setup.micro_batches
        )

    @cached_property
    def costs(self) -> tuple[KindCosts, ...]:
        """Costs of every kind among the blocks, in order of first appearance."""
        policies = choice_policies(self.select, self.comm)
        return tuple(kind_costs(self.profile.kind(kind), policies) for kind in dict.fromkeys(self.profile.blocks))

    @cached_property
    def moments(self) -> tuple[InFlight, ...]:
        """[stage]: the fullest moments of every rank."""
        born = self.before.born + self.after.born + sum(cost.born for cost in self.costs)
        return self.graph.moments(births=bool(born))

    @cached_property
    def kinds(self) -> Ints:
        """[block]: index of its kind in `costs`."""
        index = {kind: number for number, kind in enumerate(dict.fromkeys(self.profile.blocks))}
        return np.array([index[kind] for kind in self.profile.blocks], dtype=np.int64)

    @cached_property
    def before(self) -> EndCosts:
        """Layers before the blocks."""
        return EndCosts.of(self.profile, self.profile.first)

    @cached_property
    def after(self) -> EndCosts:
        """Layers after the blocks."""
        return EndCosts.of(self.profile, self.profile.last)

    def ahead(self, chunk: int) -> EndCosts:
        """What runs in a chunk, counted in layer order, before its blocks: what any takes, and layers before all."""
        before = self.before if chunk == 0 else EndCosts()
        return replace(
            before,
            forward=before.forward + self.profile.chunk_forward,
            backward=before.backward + self.profile.chunk_backward,
        )

    @cached_property
    def fixed(self) -> tuple[Floats, Floats]:
        """Forward and backward time of every chunk without its blocks, [chunk in layer order]."""
        forward = np.array([self.ahead(chunk).forward for chunk in range(self.chunks)])
        backward = np.array([self.ahead(chunk).backward for chunk in range(self.chunks)])
        forward[-1] += self.after.forward
        backward[-1] += self.after.backward
        return forward, backward

    @cached_property
    def least(self) -> Counts:
        """Fewest layers of every chunk: one, but none where the embedding or the head fills the chunk."""
        least = [1] * self.chunks
        if self.profile.first and self.chunks > 1:
            least[0] = 0
        if self.profile.last and self.chunks > 1:
            least[-1] = 0
        return tuple(least)

    def buffers(self, stage: int, layers: int) -> float:
        """Buffers of a rank that belong to no layer."""
        return 0.0 if self.profile.buffers is None else float(self.profile.buffers(stage, layers))

    def optimizer_transient(self, parameters: float) -> float:
        """Working memory of the optimizer step of a rank that holds parameters of so many bytes."""
        transient = self.profile.optimizer_transient
        return 0.0 if transient is None else float(transient(parameters))

    def table(self, counts: Sequence[int]) -> Table:
        """Counts in layer order as [chunk][stage]."""
        return tuple(tuple(counts[row * self.pp : (row + 1) * self.pp]) for row in range(self.interleave))

    def plan(self, counts: Sequence[int], choices: Ints) -> Plan:
        """The plan with these layers and choices.

        Args:
            counts: layers of every chunk, in layer order.
            choices: [chunk in layer order, choice] layers under each of `CHOICES`, in their order in the chunk.
        """
        starts = np.concatenate([[0], np.cumsum(counts)])[:-1]
        full = _first(starts, choices[:, FULL])
        select = _first(starts, choices[:, [FULL, BOTH, SELECT]].sum(axis=1))
        comm = _first(starts, choices[:, [FULL, BOTH]].sum(axis=1) + choices[:, COMM])
        policy = Policy(
            full=full,
            select=dict.fromkeys(self.select, select) if select - full else {},
            comm=dict.fromkeys(self.comm, comm) if comm - full else {},
            optimizer_comm=self.switches.optimizer_comm,
            mp_comm=self.switches.mp_comm,
            slice_activation=self.switches.slice_activation,
        )
        return Plan(setup=self.setup, layout=Layout(self.table(counts)), policy=policy)

    def choices(self, plan: Plan) -> Ints:
        """[chunk in layer order, choice]: layers of a plan under each of `CHOICES`."""
        index = {choice: number for number, choice in enumerate(CHOICES)}
        found = np.zeros((self.chunks, len(CHOICES)), dtype=np.int64)
        for chunk, stage, layers in plan.layout.chunks():
            for layer in layers:
                found[chunk * self.pp + stage, index[plan.for_layer(layer).choice]] += 1
        return found


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _first(starts: Ints, counts: Ints) -> frozenset[int]:
    """The first layers of every chunk."""
    return frozenset(
        layer
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        for layer in range(start, start + count)
    )
