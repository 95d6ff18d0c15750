"""Runs one layer of each kind, and what is before and after the layers, for real; how long each takes.

What runs is what a pipeline runs: chunks of one layer, made by the code that makes the chunks of a run, with the
recomputation of each choice. Rounds go through all of them in turn, so that a machine that slows down for a while slows
them all. Where several processes run, all measure at the same time, as they train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
from torch import distributed, nn

from evenload.errors import EvenloadError
from evenload.plan.policy import LayerPolicy, Policy, Recompute
from evenload.profile.formula import possible_choices
from evenload.profile.measured import KindTimes, Spread, Timed
from evenload.profile.traced import FIRST, LAST, TracedModel
from evenload.recompute.handle import apply
from evenload.recompute.trace_model import middle, trace_model
from evenload.record.dryrun import preparing
from evenload.runtime.anatomy import Anatomy, take_result
from evenload.runtime.examine import examine
from evenload.runtime.launch import agreed
from evenload.runtime.materials import Materials
from evenload.runtime.optimizer import make_optimizer
from evenload.runtime.pipeline import made, next_token_loss
from evenload.runtime.placement import Place
from evenload.runtime.settings import RunSettings
from evenload.runtime.stages import Chunk, make_chunk
from evenload.setup import Setup

WARM_UP: Final = 3
"""Rounds that do not count: the first forward of a layer is recorded for recomputation, memory is mapped."""
SAMPLE: Final = 0.02
"""Seconds that a sample takes at least: what is short runs several times, and the mean counts."""
MOST_RUNS: Final = 50
_EMPTY: Final = "an empty chunk"
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """What was measured."""

    kinds: Mapping[str, KindTimes]
    chunk: Timed
    transfer: Spread | None
    share: float | None
    """Share of the time in which the processes ran; None: not known of several threads, or of a GPU."""


def trace(make: Callable[[], nn.Module], setup: Setup, settings: RunSettings, *, name: str, device: str) -> TracedModel:
    """The memory of a model's layers in the step that `evenload train` runs.

    Args:
        make: makes the model.
        setup: sizes of a micro-batch.
        settings: of the run: the optimizer, autocast, and where the layers are.
        name: what to call it.
        device: kind of device.

    Raises:
        EvenloadError: see `trace_model`.
    """
    shape = (setup.micro_batch, setup.seq)
    target: list[torch.Tensor] = []

    def loss(returned: Any) -> torch.Tensor:
        if not target:
            target.append(torch.zeros(shape, dtype=torch.int64))
        logits = take_result(returned)
        found = next_token_loss(logits, target[0])
        cast("Any", found).logits = logits  # a pipeline's stage holds what it returned until its backward has ended
        return found

    def built() -> nn.Module:
        target.clear()
        return make()

    prepare = preparing(
        built,
        device=device,
        inputs=lambda: torch.zeros(shape, dtype=torch.int64),
        loss=loss,
        optimizer=lambda parameters: make_optimizer(parameters, settings),
        micro_batches=2,
        autocast=_type(settings),
    )
    return trace_model(prepare, name=name, device=device, layers=settings.layers)


def measure(
    make: Callable[[], nn.Module],
    traced: TracedModel,
    setup: Setup,
    settings: RunSettings,
    *,
    rounds: int,
    device: torch.device,
    tell: Callable[[int], object] = lambda _: None,
) -> Times:
    """Time every kind of layer; called in every process, in a process group.

    Args:
        make: makes the model.
        traced: its layers.
        setup: sizes of a micro-batch.
        settings: of the run.
        rounds: how often everything runs, beside the warm-up.
        device: where it runs.
        tell: called with the number of rounds that are done.

    Raises:
        EvenloadError: the model cannot be cut into layers.
    """
    autocast = _type(settings)
    with agreed():
        bench = _bench(made(make), traced, setup, settings, device)
        subjects = list(_subjects(bench, traced))
    samples: dict[tuple[str, LayerPolicy], list[tuple[float, float]]] = {one.key: [] for one in subjects}
    shares: list[float] = []
    updates: dict[str, list[float]] = {one.kind: [] for one in subjects if one.optimizer is not None}
    with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
        for number in range(WARM_UP + rounds):
            cast("Any", distributed).barrier()
            began = perf_counter(), process_time()
            for one in subjects:
                taken = one.sample()
                if number >= WARM_UP:
                    samples[one.key].append(taken)
                if one.optimizer is not None:
                    spent = one.update()
                    if number >= WARM_UP:
                        updates[one.kind].append(spent)
            shares.append((process_time() - began[1]) / (perf_counter() - began[0]))
            tell(number + 1)
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    share = float(np.median(_pooled({"share": shares})["share"])) if alone else None
    kinds, chunk = _times(_pooled(samples), _pooled(updates))
    return Times(kinds=kinds, chunk=chunk, transfer=_transfer(bench.anatomy, device, rounds), share=share)


def _bench(model: nn.Module, traced: TracedModel, setup: Setup, settings: RunSettings, device: torch.device) -> _Bench:
    tokens, autocast = torch.zeros((setup.micro_batch, setup.seq), dtype=torch.int64), _type(settings)
    with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
        anatomy = examine(model, (tokens,), settings.layers)
    if len(anatomy.layers) != len(traced.kinds):
        raise EvenloadError(
            f"a pipeline would deal {len(anatomy.layers)} layers, the trace has {len(traced.kinds)}",
            where="--layers",
            fix="name what holds the layers",
        )
    return _Bench(Materials(model, device, seed=settings.seed, init=None), anatomy, setup, device, settings)


class _Bench:
    """What subjects are made of."""

    def __init__(
        self, materials: Materials, anatomy: Anatomy, setup: Setup, device: torch.device, settings: RunSettings
    ) -> None:
        self.materials, self.anatomy, self.device, self.settings = materials, anatomy, device, settings
        vocabulary = anatomy.result.shape[-1]
        shape = (setup.micro_batch, setup.seq)
        self.tokens = torch.randint(vocabulary, shape, device=device)
        self.target = torch.randint(vocabulary, shape, device=device)

    def chunk(self, layers: range, *, first: bool = False, last: bool = False) -> Chunk:
        """A chunk with these layers."""
        place = Place(index=0 if first else 1, rank=0, layers=layers, first=first, last=last)
        chunk = make_chunk(self.materials, place, self.anatomy)
        if not layers:
            container = chunk.model.get_submodule(chunk.container)
            for name, _ in list(container.named_children()):
                setattr(container, name, _Through(self.anatomy))
            chunk.arm()
        self.materials.fill(chunk.model, chunk.full_names)
        return chunk


class _Through(nn.Module):
    """A layer that takes no time; the one of an empty chunk makes a copy."""

    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__()
        self._argument, self._in_tuple = anatomy.argument, anatomy.in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the input."""
        given: torch.Tensor = args[self._argument] if isinstance(self._argument, int) else kwargs[self._argument]
        return (given.view_as(given),) if self._in_tuple else given.view_as(given)


class _Subject:
    """One chunk under one policy."""

    def __init__(self, kind: str, policy: LayerPolicy, chunk: Chunk, bench: _Bench, *, updates: bool) -> None:
        self.kind, self.policy, self._chunk, self._bench = kind, policy, chunk, bench
        hidden = bench.anatomy.hidden
        self._given = torch.randn(hidden.shape, device=bench.device).to(hidden.dtype)
        self._gradient = torch.randn(hidden.shape, device=bench.device).to(hidden.dtype)
        parameters = [one for one in chunk.parameters() if one.requires_grad]
        still = RunSettings(adamw=bench.settings.adamw, learning_rate=0.0)  # so that rounds are alike
        self.optimizer = make_optimizer(parameters, still) if updates and parameters else None
        self._parameters = parameters
        self._times = 1

    @property
    def key(self) -> tuple[str, LayerPolicy]:
        """What is measured."""
        return self.kind, self.policy

    def sample(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward: means of enough runs to be measured."""
        forward, backward = np.mean([self._run() for _ in range(self._times)], axis=0).tolist()
        if self._times == 1:
            self._times = max(1, min(MOST_RUNS, math.ceil(SAMPLE / (forward + backward))))
        return forward, backward

    def _run(self) -> tuple[float, float]:
        bench, chunk = self._bench, self._chunk
        hidden = None if chunk.place.first else self._given.detach().requires_grad_()
        clock = _Clock(bench.device)
        returned = chunk(hidden, tokens=bench.tokens)
        if chunk.place.last:
            returned = next_token_loss(returned, bench.target) / 2
        clock.lap()
        torch.autograd.backward(returned, None if chunk.place.last else self._gradient)
        clock.lap()
        forward, backward = clock.laps()
        return forward, backward

    def update(self) -> float:
        """The norm of the gradients, and the optimizer, once."""
        assert self.optimizer is not None  # noqa: S101  # asked only where it is
        clock = _Clock(self._bench.device)
        torch.nn.utils.get_total_norm([one.grad for one in self._parameters if one.grad is not None])
        cast("Any", self.optimizer).step()
        clock.lap()
        return clock.laps()[0]


class _Clock:
    """Laps on a CPU, or on the stream of a GPU, which is not made to wait between them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.lap()

    def lap(self) -> None:
        """A lap ends."""
        if self._cuda:
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(perf_counter())

    def laps(self) -> list[float]:
        """Seconds of every lap."""
        if self._cuda:
            self._marks[-1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [one.elapsed_time(other) / 1e3 if self._cuda else other - one for one, other in pairs]


def _subjects(bench: _Bench, traced: TracedModel) -> Iterator[_Subject]:
    plain = LayerPolicy()
    yield _Subject(_EMPTY, plain, bench.chunk(range(0)), bench, updates=False)
    yield _Subject(FIRST, plain, bench.chunk(range(0), first=True), bench, updates=True)
    for kind in dict.fromkeys(traced.kinds):
        number = middle(traced.kinds, kind)
        choices = (Recompute.NONE,) if traced.step.recomputes else possible_choices(traced.graphs[kind])
        for choice in choices:
            chunk = bench.chunk(range(number, number + 1))
            if choice is not Recompute.NONE:
                apply(chunk.model, Policy.everywhere(choice, 1), layers=chunk.container)
                chunk.arm()
            yield _Subject(kind, LayerPolicy.of(choice), chunk, bench, updates=choice is Recompute.NONE)
    yield _Subject(LAST, plain, bench.chunk(range(0), last=True), bench, updates=True)


def _pooled(samples: dict[K, list[V]]) -> dict[K, list[V]]:
    """The samples of all processes."""
    found: list[Any] = [None] * distributed.get_world_size()
    cast("Any", distributed).all_gather_object(found, list(samples.values()))
    return {key: [value for one in found for value in one[at]] for at, key in enumerate(samples)}


def _times(
    samples: Mapping[tuple[str, LayerPolicy], Sequence[tuple[float, float]]],
    updates: Mapping[str, Sequence[float]],
) -> tuple[dict[str, KindTimes], Timed]:
    """Layers without what an empty chunk takes, and what recomputation adds, both round by round: noise cancels."""
    empty = np.array(samples[_EMPTY, LayerPolicy()])
    runs: dict[str, list[Timed]] = {}
    for (kind, policy), taken in samples.items():
        plain = np.array(samples[kind, LayerPolicy()]) - (0 if kind == _EMPTY else empty)
        more = np.median(np.array(taken) - np.array(samples[kind, LayerPolicy()]), axis=0)
        alone = plain + np.maximum(0.0, more)
        forward, backward = _spread(alone[:, 0]), _spread(alone[:, 1])
        runs.setdefault(kind, []).append(Timed(policy=policy, forward=forward, backward=backward))
    none = Spread(median=0.0, low=0.0, high=0.0)
    kinds = {
        kind: KindTimes(runs=tuple(timed), update=_spread(updates[kind]) if kind in updates else none)
        for kind, timed in runs.items()
        if kind != _EMPTY
    }
    return kinds, runs[_EMPTY][0]


def _spread(seconds: Iterable[float]) -> Spread:
    low, median, high = (max(0.0, float(one)) for one in np.quantile(np.array(list(seconds)), (0.25, 0.5, 0.75)))
    return Spread(median=median, low=low, high=high)


def _transfer(anatomy: Anatomy, device: torch.device, rounds: int) -> Spread | None:
    """There and back between the first two processes, halved."""
    if distributed.get_world_size() < 2:
        return None
    rank, talk = distributed.get_rank(), cast("Any", distributed)
    tensor = torch.empty(anatomy.hidden.shape, dtype=anatomy.hidden.dtype, device=device)
    taken: list[float] = []
    for number in range(WARM_UP + rounds):
        talk.barrier()
        if rank > 1:
            continue
        clock = _Clock(device)
        for sender in (0, 1):
            talk.send(tensor, 1 - rank) if sender == rank else talk.recv(tensor, 1 - rank)
        clock.lap()
        if number >= WARM_UP:
            taken.append(clock.laps()[0] / 2)
    return _spread(_pooled({"transfer": taken})["transfer"])


def _type(settings: RunSettings) -> torch.dtype | None:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[settings.autocast] if settings.autocast else None
