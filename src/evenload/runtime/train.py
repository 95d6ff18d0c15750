"""Training under a plan: one process's part of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Final, cast

import numpy as np
import torch
from torch import distributed, nn

from evenload.errors import ANSWER_NO, EvenloadError
from evenload.plan.plan import Plan
from evenload.record.hugging_face import model_builder
from evenload.record.periodic_gc import Collected, PeriodicGC
from evenload.record.steps import resident_bytes
from evenload.runtime import checkpoint
from evenload.runtime.data import Tokens, read_tokens
from evenload.runtime.exhausted import room
from evenload.runtime.launch import agreed, common, joined, together
from evenload.runtime.logs import Log, StepLine
from evenload.runtime.optimizer import learning_rate, make_optimizer, set_learning_rate
from evenload.runtime.pace import Pace, StepTime
from evenload.runtime.pipeline import Pipeline, parallelize
from evenload.runtime.ranks import device_mesh
from evenload.runtime.reference import FAMILIES, ReferenceModel, read_sizes
from evenload.runtime.settings import RunSettings
from evenload.runtime.step import train_step
from evenload.runtime.stopping import Stopping
from evenload.runtime.watch import Watch

DTYPES: Final[Mapping[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Say = Callable[[str], object]
Source = Mapping[str, Any] | Callable[[], nn.Module]
"""What a model is made from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended."""

    step: int
    """Steps that are done."""
    loss: float | None
    """Of the last one; None: there was none."""
    signal: int | None
    """What told it to stop; None: it is done."""
    saved: Path | None
    """Its last checkpoint."""
    step_time: StepTime
    """Predicted and measured."""


def train(
    model: Source, plan: Plan, settings: RunSettings, *, step_time: float | None = None, say: Say = print
) -> Ended:
    """Train a model as a plan says; called in every process of the run.

    Args:
        model: a Hugging Face configuration, or a function that makes a decoder.
        plan: how it is trained.
        settings: data, optimizer, checkpoints.
        step_time: seconds that a step is predicted to take; None: nobody knows.
        say: called on rank 0 with every line of the log.

    Raises:
        EvenloadError: something does not fit, on the rank that says so; `launch.Silent` on all others.
    """
    with joined(plan.setup.devices, timeout=settings.timeout), together():
        return _Run(model, plan, settings, say).go(Pace(step_time))


def build(source: Source, plan: Plan, implementation: str = "auto") -> Callable[[], nn.Module]:
    """A function that makes the model: that of a configuration, or the user's own.

    Raises:
        EvenloadError: there is no code for it, or it cannot be read.
    """
    if callable(source):
        return source
    config = source
    where, dtype = plan.model or "config.json", DTYPES[plan.setup.parameter_dtype]
    if implementation == "reference" or (implementation == "auto" and find_spec("transformers") is None):
        sizes = read_sizes(config, where)

        def make() -> nn.Module:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                return ReferenceModel(sizes)
            finally:
                torch.set_default_dtype(before)

        return make
    if config.get("model_type") == "reference":
        known = {**config, "model_type": FAMILIES[0]}
        return model_builder(known, where=where, dtype=dtype, attention=plan.setup.attention)
    return model_builder(config, where=where, dtype=dtype, attention=plan.setup.attention)


class _Run:
    """One process's part of a run."""

    def __init__(self, source: Source, plan: Plan, settings: RunSettings, say: Say) -> None:
        self._plan = plan
        self._settings = settings
        with agreed():
            check_trainable(plan)
            if settings.checkpoints is not None and not settings.resume:
                checkpoint.refuse_foreign(settings.checkpoints)
            vocabulary = None if callable(source) else source.get("vocab_size")
            data = None if vocabulary is None else self._read_data(vocabulary)
            make = build(source, plan, settings.implementation)
        self.pipeline = self._divided(make)
        with agreed():  # a function's model tells by what it returns
            self._data = data or self._read_data(self.pipeline.anatomy.result.shape[-1])
        self._watch = Watch(plan, settings, self.pipeline, make)
        self._optimizer = make_optimizer(self.pipeline.parameters(), settings)
        self._rank = distributed.get_rank()
        self._say: Say = say if self._rank == 0 else _nothing
        self._saved = self._resumed()
        self._done = 0 if self._saved is None else self._saved.mark.step
        self._device = self.pipeline.ranks.device

    def _read_data(self, vocabulary: int) -> Tokens:
        return read_tokens(self._settings.data, vocabulary=vocabulary, length=self._plan.setup.seq)

    def _divided(self, make: Callable[[], nn.Module]) -> Pipeline:
        settings = self._settings
        with room("while its part of the model is made"):
            pipeline, _ = parallelize(
                make,
                self._plan,
                device_mesh(self._plan) if self._plan.setup.devices > self._plan.setup.pp else None,
                layers=settings.layers,
                autocast=DTYPES[settings.autocast] if settings.autocast else None,
                accumulation=settings.accumulation,
                seed=settings.seed,
            )
        return pipeline

    def _resumed(self) -> checkpoint.Saved | None:
        settings = self._settings
        if not settings.resume or settings.checkpoints is None:
            return None
        with agreed():
            saved = checkpoint.newest(settings.checkpoints)
            if saved is not None and saved.mark.seed != settings.seed:
                raise EvenloadError(
                    f"the checkpoint is of a run with seed {saved.mark.seed}, and seed is {settings.seed}",
                    where=str(saved.path),
                    fix="resume with the same seed: the order of the data depends on it",
                )
        if saved is None:
            self._say(f"{settings.checkpoints} has no checkpoint: the run begins")
            return None
        checkpoint.load(saved, self.pipeline, self._optimizer)
        self._say(f"resumed after step {saved.mark.step} from {saved.path}")
        return saved

    def go(self, pace: Pace) -> Ended:
        """Run the steps that are left."""
        settings, line, told, step = self._settings, None, None, self._done
        path = None if self._saved is None else self._saved.path
        with ExitStack() as stack:
            if settings.checkpoints is not None:
                stack.enter_context(checkpoint.claimed(settings.checkpoints))
            stopping = stack.enter_context(Stopping(self._device))
            collector = stack.enter_context(self._collector()) if settings.collect_every else None
            with agreed():
                log = stack.enter_context(self._log())
            watch = stack.enter_context(self._watch.begun(self._optimizer, self._say))
            while step < settings.steps and told is None:
                began = perf_counter()
                line = self._step(step)
                pace.step(perf_counter() - began)
                step += 1
                log.tell(line)
                watch.step()
                if collector is not None:
                    collector.step()
                told = stopping.agreed()
                if self._is_saved(step, told):
                    path = self._save(step)
            watch.tell_pace(pace.found)
        return Ended(step=step, loss=None if line is None else line.loss, signal=told, saved=path, step_time=pace.found)

    def _step(self, step: int) -> StepLine:
        began = perf_counter()
        setup, settings = self._plan.setup, self._settings
        drawn = np.random.SeedSequence((settings.seed, step, self._rank)).generate_state(1, np.uint64)
        cast("Any", torch).manual_seed(int(drawn[0]) % 2**63)  # for dropout: the same after a resumption
        rate = learning_rate(step, settings)
        set_learning_rate(self._optimizer, rate)
        done = train_step(self.pipeline, self._optimizer, settings, self._batch, step)
        tokens = setup.micro_batch * setup.micro_batches * setup.seq * setup.dp * settings.accumulation
        return StepLine(
            step=step + 1,
            loss=self._mean(done.loss),
            norm=float(done.norm),
            learning_rate=rate,
            tokens_per_second=tokens / (perf_counter() - began),
            memory=self._memory(),
        )

    def _batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        setup, ranks = self._plan.setup, self.pipeline.ranks
        try:
            tokens, target = self._data.batch(
                step=number,
                part=ranks.replica,
                parts=setup.dp,
                sequences=setup.micro_batch * setup.micro_batches,
                length=setup.seq,
                seed=self._settings.seed,
            )
        except EvenloadError as error:  # all ranks look at all of a batch
            raise common(error) from None
        return tokens.to(self._device, copy=True), target.to(self._device, copy=True)  # NumPy's memory is not counted

    def _mean(self, loss: torch.Tensor) -> float:
        """The loss of all replicas: every rank has that of its own."""
        if self._plan.setup.dp > 1:
            cast("Any", distributed).all_reduce(loss)
            loss /= distributed.get_world_size()
        value = float(loss)
        if math.isnan(value):
            fix = "lower --learning-rate, or set --clip"
            raise common(EvenloadError("the loss is not a number any more", fix=fix, exit_code=ANSWER_NO))
        return value

    def _memory(self) -> tuple[int, ...]:
        cuda = self._device.type == "cuda"
        own = torch.cuda.max_memory_allocated(self._device) if cuda else resident_bytes()
        held = [torch.zeros((), dtype=torch.int64, device=self._device) for _ in range(distributed.get_world_size())]
        mine = torch.tensor(own, dtype=torch.int64, device=self._device)
        cast("Any", distributed).all_gather(held, mine)
        return tuple(int(one) for one in held)

    def _is_saved(self, step: int, told: int | None) -> bool:
        settings = self._settings
        if settings.checkpoints is None:
            return False
        every = settings.checkpoint_every
        return told is not None or step == settings.steps or (every is not None and step % every == 0)

    def _save(self, step: int) -> Path:
        settings = self._settings
        path = checkpoint.save(
            str(settings.checkpoints),
            self.pipeline,
            self._optimizer,
            step=step,
            seed=settings.seed,
            keep=settings.keep,
        )
        self._say(f"saved {path}")
        return path

    def _collector(self) -> PeriodicGC:
        def report(run: Collected) -> None:
            if run.nbytes:
                self._say(str(run))

        return PeriodicGC(every=self._settings.collect_every or 1, automatic=False, report=report)

    def _log(self) -> Log:
        settings = self._settings
        return Log(
            speaks=self._rank == 0,
            steps=settings.steps,
            done=self._done,
            every=settings.log_every,
            path=settings.log_file,
            say=self._say,
        )


def check_trainable(plan: Plan) -> None:
    """Make sure that a plan is one that this trainer runs.

    Raises:
        EvenloadError: it is not; with what to say instead.
    """
    setup = plan.setup
    same = "PyTorch's own optimizers keep it in the type of the parameters"
    for name, wrong, why, fix in (
        ("backend", setup.backend != "torch", "PyTorch trains here", "use --backend torch"),
        ("cp", setup.cp > 1, "sequences are not divided", "leave cp at 1"),
        ("ep", setup.ep > 1, "experts are not divided", "leave ep at 1"),
        ("dtype", setup.dtype not in DTYPES, "no PyTorch module computes in it by itself", "use bf16, fp16 or fp32"),
        ("optimizer", setup.optimizer != "adamw", "AdamW trains here", "use --optimizer adamw"),
        (
            "master_weights",
            setup.main_copies and not setup.fsdp_mixed,
            "PyTorch's own optimizers have no main copies",
            "use --dtype fp32 with --autocast bf16",
        ),
        ("grad_dtype", setup.gradient_dtype != setup.parameter_dtype, same, "leave grad_dtype out"),
        ("optimizer_dtype", setup.moment_dtype != setup.parameter_dtype, same, "leave optimizer_dtype out"),
    ):
        if wrong:
            raise EvenloadError(f"{name} is {getattr(setup, name)}, and {why}", where=f"$.{name}", fix=fix)


def _nothing(_: str) -> None:
    """Said by another rank."""
