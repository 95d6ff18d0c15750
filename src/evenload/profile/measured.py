"""A measured profile: a traced model, and how long its layers really took on some machine.

Memory is that of the traced model, for any recomputation. Times are those that were measured, for the choices that
were; another choice of operators adds to the measured backward what recomputing them takes in forwards, by the graph.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec

from evenload.errors import EvenloadError, shown
from evenload.plan.policy import LayerPolicy, Policy
from evenload.profile.profile import Cost, LayerProfile, Profile
from evenload.profile.traced import FIRST, LAST, TracedModel
from evenload.setup import Setup

Code = Literal["reference", "transformers", "own"]
"""Whose code the model is."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_FIXED: Final = (
    *("tp", "cp", "dp", "ep", "zero", "backend", "attention", "seq", "micro_batch"),
    *("dtype", "grad_dtype", "master_weights", "optimizer", "optimizer_dtype"),
)
"""Fields of a setup that times or bytes depend on, beside what is planned."""
_SILENT: Final = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Keys of a configuration that change nothing of a layer's time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A time that was measured in several rounds, in seconds."""

    median: Seconds
    low: Seconds
    """A quarter of the rounds took less."""
    high: Seconds
    """A quarter took more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One layer under one policy, for one micro-batch."""

    policy: LayerPolicy
    forward: Spread
    backward: Spread
    """What is recomputed included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTimes:
    """The layers of one kind."""

    runs: tuple[Timed, ...]
    """Policy by policy; the first recomputes nothing."""
    update: Spread
    """Gradient norm and optimizer step of one layer's parameters, once a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Where and how it was measured: elsewhere, other times hold."""

    device: Literal["cpu", "cuda"]
    hardware: str
    """What the processor or the GPU calls itself."""
    torch: str
    threads: int
    """Threads of PyTorch in every process."""
    processes: int
    """Processes that ran at the same time, each of which measured."""
    rounds: int
    code: Code
    autocast: Literal["bf16", "fp16"] | None = None
    adamw: Literal["fused", "foreach", "loop"] = "fused"
    share: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Share of the time in which the processes ran; others had the rest. None: not known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What was measured of a model, for any plan that does not divide its layers."""

    model: str
    """What names the model: a preset, a file or a function."""
    digest: str
    """Of its configuration; see `digest_of`."""
    setup: Setup
    """At which it was measured; degrees of the pipeline say nothing."""
    conditions: Conditions
    traced: TracedModel
    times: Mapping[str, KindTimes]
    """Kind -> times, those before and after the layers included."""
    chunk: Timed
    """What a chunk takes beside its layers: masks, positions, calls."""
    transfer: Spread | None = None
    """One layer's result from one process to another; None: nobody measured it."""
    bandwidth: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Bytes a second between two processes, as the user states it; None: not stated."""

    def __post_init__(self) -> None:
        wanted = {FIRST, LAST, *self.traced.kinds}
        for name, found in (
            ("times", self.times),
            ("traced.graphs", self.traced.graphs),
            ("traced.memory", self.traced.memory),
            ("traced.held", self.traced.held),
        ):
            if missing := sorted(wanted - set(found)):
                raise EvenloadError(f"it says nothing of {missing[0]!r}", where=f"$.{name}", fix="measure again")
        for kind, times in self.times.items():
            if not times.runs or times.runs[0].policy != LayerPolicy():
                raise EvenloadError("there is no run without recomputation", where=f"$.times[{kind!r}].runs")

    # what `TracedModel` says too: either can stand where a profile is wanted for a setup

    @property
    def name(self) -> str:
        """What names the model."""
        return self.model

    @property
    def path(self) -> str:
        """Module path of the list of layers."""
        return self.traced.path

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every layer."""
        return self.traced.kinds

    @property
    def parameters(self) -> int:
        """Parameters (elements) of the model."""
        return self.traced.parameters

    def profile(self, setup: Setup, policy: Policy | None = None) -> Profile:
        """What the layers cost under a setup; memory in bytes, time in seconds, for one micro-batch.

        Args:
            setup: how the layers are dealt to stages.
            policy: whose switches for the whole run to follow.

        Raises:
            EvenloadError: the setup differs from the measured one in what times or bytes depend on.
        """
        self.check(setup)
        base = self.traced.profile(setup, policy)
        layers = {kind: self._layer(layer, self.times[kind]) for kind, layer in base.layers.items()}
        memory = tuple(note for note in base.notes if not note.startswith("Times:"))
        return replace(
            base,
            layers=layers,
            chunk_forward=self.chunk.forward.median,
            chunk_backward=self.chunk.backward.median,
            transfer_time=self._transfer_time(base) if setup.pp > 1 else 0.0,
            origin="measured",
            notes=(*memory, f"Times: {self.measured_at}.", *self._assumed()),
        )

    @property
    def measured_at(self) -> str:
        """Where and how, in words."""
        now = self.conditions
        threads = "1 thread" if now.threads == 1 else f"{now.threads} threads"
        among = "" if now.processes == 1 else f" in each of {now.processes} processes at once"
        return f"medians of {now.rounds} rounds on {now.hardware}, torch {now.torch}, {threads}{among}"

    def check(self, setup: Setup) -> None:
        """Make sure that a setup is one that this profile is about.

        Raises:
            EvenloadError: the first field that differs.
        """
        for name in _FIXED:
            own, asked = getattr(self.setup, name), getattr(setup, name)
            if own != asked:
                raise EvenloadError(
                    f"{name} is {shown(asked)}, but the profile was measured at {shown(own)}",
                    where=f"$.{name}",
                    fix=f"measure again at {shown(asked)}, or use {shown(own)}",
                )

    def check_model(self, name: str, digest: str) -> None:
        """Make sure that a model is the one that was measured.

        Raises:
            EvenloadError: it is another.
        """
        if digest != self.digest:
            raise EvenloadError(
                f"the profile is one of {self.model}, which is another model than {name}",
                where="$.model",
                fix=f"measure this one: evenload profile {name}",
            )

    def _transfer_time(self, base: Profile) -> float:
        if self.bandwidth is not None:
            return base.boundary / self.bandwidth
        return base.transfer_time if self.transfer is None else self.transfer.median

    def _assumed(self) -> tuple[str, ...]:
        if self.bandwidth is not None:
            return ("Times between ranks follow from the bandwidth that was stated.",)
        if self.transfer is None:
            return (
                "Times between ranks are those of the hardware preset: one process measured, with nobody to send to.",
            )
        return ()

    def _layer(self, layer: LayerProfile, times: KindTimes) -> LayerProfile:
        known = {run.policy: run for run in times.runs}
        plain = times.runs[0]
        modelled = layer.cost(LayerPolicy()).forward_time

        @lru_cache(maxsize=256)
        def cost(policy: LayerPolicy) -> Cost:
            own = layer.cost(policy)
            run = known.get(policy)
            if run is None:
                again = own.recompute_time * plain.forward.median / modelled if modelled else 0.0
                forward, backward = plain.forward.median, plain.backward.median + again
            else:
                forward, backward = run.forward.median, run.backward.median
            return replace(
                own,
                forward_time=forward,
                backward_time=backward,
                recompute_time=max(0.0, backward - plain.backward.median),
            )

        return replace(layer, cost=cost, update_time=times.update.median)


def digest_of(config: Mapping[str, Any] | str) -> str:
    """What tells a model from others: of a configuration what it says, of a function its name.

    Examples:
        >>> digest_of("package.module:build")
        'package.module:build'
    """
    if isinstance(config, str):
        return config
    said = {key: value for key, value in config.items() if key not in _SILENT}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]
