"""The profile of any module: its layers are recorded in a dry run instead of being described.

Without recomputation the memory of a layer is what the dry run's ledger says, event for event. What a recompute policy
changes follows from the layer's operators, by the rules that formula profiles use; times are those of the operators on
the hardware, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from types import MappingProxyType
from typing import Final

from evenload.errors import EvenloadError
from evenload.plan.operators import Graph, Operator
from evenload.plan.policy import LayerPolicy, Policy, Recompute
from evenload.profile.buffers import SMALL_WORKSPACE, WORKSPACE, outside_parts, pipeline_buffers
from evenload.profile.cost import Births, graph_cost
from evenload.profile.formula import possible_choices
from evenload.profile.hardware import Hardware, find_hardware, operator_time, transfer_time
from evenload.profile.profile import Cost, LayerProfile, Profile, Segment
from evenload.setup import DType, Setup

FIRST: Final = "before the layers"
LAST: Final = "after the layers"
"""Kinds of what comes before and after the repeated layers."""
_UNDIVIDED: Final = {"tp": 1, "cp": 1, "dp": 1, "ep": 1, "zero": 0}
"""Fields of a setup that would divide layers, and what they are where they do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What a part of the model holds whatever runs, in bytes."""

    count: int = 0
    """Parameters (elements)."""
    parameters: int = 0
    """Parameters and buffers of modules."""
    gradients: int = 0
    optimizer: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(
            count=self.count + other.count,
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMemory:
    """What a part of the model does to memory in one micro-batch, without recomputation."""

    forward: Segment
    backward: Segment
    first_backward: Segment | None = None
    """The first backward of a step, with the gradients that come to be in it; as `Cost.first_backward`."""

    @property
    def born(self) -> float:
        """Gradients that come to be in the first backward of a step."""
        return 0.0 if self.first_backward is None else self.first_backward.net - self.backward.net


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """What a step holds or does beside its layers."""

    resident: int
    """Bytes that are there all the time and are neither parameters nor what belongs to them: a batch, for one."""
    optimizer_transient: int
    """Working memory of the optimizer."""
    optimizer_loops: bool
    """That memory is for one parameter at a time, not for all of them."""
    recomputes: bool
    """Backward runs forward again: the model's own code checkpoints."""
    accumulates: bool
    """Gradients are added to those of earlier micro-batches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """What a dry run says about a model, for any setup that does not divide its layers."""

    name: str
    path: str
    """Module path of the list of layers."""
    kinds: tuple[str, ...]
    """Kind of every layer."""
    graphs: Mapping[str, Graph]
    """Kind -> operators."""
    memory: Mapping[str, LayerMemory]
    """Kind -> memory without recomputation."""
    held: Mapping[str, Held]
    """Kind -> what it holds."""
    tied: Held
    """What the part after the layers shares with the one before: a stage of its own holds a copy."""
    step: StepMemory
    boundary: int
    """Bytes that go from layer to layer; the most where they differ."""
    dtype: DType
    """Type that the matrix products run in."""
    device: str = "cuda"
    """Kind of device that the dry run was for: a CPU has no context, and its products no workspace."""
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Parameters (elements) of the model."""
        layers = sum((self.held[kind].count for kind in self.kinds), 0)
        return layers + self.held[FIRST].count + self.held[LAST].count

    def profile(self, setup: Setup, policy: Policy | None = None) -> Profile:
        """What the layers cost under a setup; memory in bytes, time in seconds, for one micro-batch.

        Args:
            setup: how the layers are dealt to stages; its sizes and types are not asked for, the model has its own.
            policy: whose switches for the whole run to follow.

        Raises:
            EvenloadError: the setup divides layers, or names unknown hardware.
        """
        _check(setup, len(self.kinds))
        hardware = find_hardware(setup.hardware)
        own = replace(setup, dtype=self.dtype)
        switches = policy or Policy()
        cpu = self.device == "cpu"
        outside: Mapping[str, int] = MappingProxyType({}) if cpu else outside_parts(setup)
        workspace = 0 if cpu else WORKSPACE.get(hardware.name, SMALL_WORKSPACE)

        @cache
        def parts(stage: int) -> Mapping[str, int]:
            sizes = {
                "pipeline send and receive buffers": pipeline_buffers(setup, self.boundary, stage),
                "workspace of matrix products": workspace,
            }
            return {name: nbytes for name, nbytes in sizes.items() if nbytes}

        layers = {kind: self._layer(kind, own, hardware, switches) for kind in (FIRST, *self.graphs_of_layers, LAST)}
        return Profile(
            layers=MappingProxyType(layers),
            blocks=self.kinds,
            first=(FIRST,),
            last=(LAST,),
            outside=sum(outside.values()),
            outside_parts=outside,
            boundary=self.boundary,
            transfer_time=transfer_time(self.boundary, hardware, own),
            buffers=lambda stage, _: sum(parts(stage).values()),
            buffer_parts=parts,
            optimizer_transient=self._optimizer_transient,
            origin="traced",
            notes=(
                *self.notes,
                f"Times: {hardware.name} at {hardware.matmul_efficiency:.0%} of its {self.dtype} matrix rate.",
            ),
        )

    @cached_property
    def graphs_of_layers(self) -> tuple[str, ...]:
        """Kinds of layers in order of first appearance."""
        return tuple(dict.fromkeys(self.kinds))

    def _optimizer_transient(self, parameters: float) -> float:
        """Working memory of the optimizer for a rank's parameters: a share of them, or that of one at a time."""
        most = self.step.optimizer_transient
        if self.step.optimizer_loops:
            return float(min(most, 4 * parameters))
        whole = sum(self.held[kind].parameters for kind in (*self.kinds, FIRST, LAST))
        return most * parameters / whole if whole else 0.0

    def _layer(self, kind: str, setup: Setup, hardware: Hardware, switches: Policy) -> LayerProfile:
        graph = self.graphs[kind]
        end = kind in {FIRST, LAST}
        held = self.held[kind] + (self.tied if kind == LAST and setup.pp > 1 else Held())
        memory = self.memory[kind]
        if kind == FIRST and setup.pp > 1:
            memory = _with_own(memory, self.tied.gradients)
        births = None if memory.first_backward is None else Births(gradients=memory.born, weight_gradients=0.0)

        @cache
        def times(operator: Operator) -> float:
            return operator_time(operator, hardware, setup)

        def computed(policy: LayerPolicy) -> Cost:
            weights = 1.0 if self.step.accumulates else 0.0
            own = graph_cost(graph, policy, times, mp_comm=switches.mp_comm, weight_gradients=weights, births=births)
            return _bearing(own, memory.born)

        plain = computed(LayerPolicy())

        @lru_cache(maxsize=256)
        def cost(policy: LayerPolicy) -> Cost:
            own = computed(policy)
            if policy.choice is Recompute.NONE:
                return replace(
                    own, forward=memory.forward, backward=memory.backward, first_backward=memory.first_backward
                )
            return _with_unseen(own, memory.forward.net - plain.kept, again=policy.full)

        return LayerProfile(
            kind=kind,
            parameters=held.parameters,
            gradients=held.gradients,
            optimizer=held.optimizer,
            buffers=self.step.resident if kind == FIRST else 0.0,
            count=held.count,
            cost=cost,
            graph=graph,
            choices=(Recompute.NONE,) if end or self.step.recomputes else possible_choices(graph),
        )


def _check(setup: Setup, layers: int) -> None:
    """A traced model is dealt to stages as it is: what divides its layers is its own code's business."""
    for name, plain in _UNDIVIDED.items():
        if getattr(setup, name) != plain:
            raise EvenloadError(
                f"{name} is {getattr(setup, name)}, but a traced model divides its layers itself",
                where=f"$.{name}",
                fix="leave it out, and let the function build one rank's part of the model",
            )
    if setup.chunks > layers:
        raise EvenloadError(
            f"pp {setup.pp} x interleave {setup.interleave} needs {setup.chunks} chunks, "
            f"but the model has {layers} layers",
            where="$.pp" if setup.pp > 1 else "$.interleave",
            fix=f"lower them until pp x interleave is at most {layers}",
        )


def _with_unseen(cost: Cost, unseen: float, *, again: bool) -> Cost:
    """A cost with memory that a layer keeps where no operator says so, such as tensors in attributes of a context.

    Where the whole layer runs again it is made again too; otherwise it stays.
    """
    if not unseen or (again and unseen < 0):
        return cost
    first = cost.first_backward
    before = (unseen,) if again else ()

    def ending(segment: Segment) -> Segment:
        return Segment(events=(*before, *segment.events, -unseen))

    forward = cost.forward if again else Segment(events=(*cost.forward.events, unseen))
    return replace(
        cost, forward=forward, backward=ending(cost.backward), first_backward=None if first is None else ending(first)
    )


def _bearing(cost: Cost, born: float) -> Cost:
    """A cost with all gradients of a layer: those that its operators do not account for come last."""
    if cost.first_backward is None or cost.born == born:
        return cost
    return replace(cost, first_backward=Segment(events=(*cost.first_backward.events, born - cost.born)))


def _with_own(memory: LayerMemory, gradients: float) -> LayerMemory:
    """Memory of a part whose stage has gradients of its own, which the traced process added to those of the end."""
    if memory.first_backward is None or not gradients:
        return memory
    return replace(memory, first_backward=Segment(events=(*memory.first_backward.events, gradients)))
