"""A function of the user's in the place of a model: `package.module:function`, traced instead of described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenload.cli.flags import Flags, Tracing
from evenload.cli.functions import TRACE, refuse_beside_step, refuse_meaningless
from evenload.cli.inputs import read_layout, read_limit, read_policy, read_setup
from evenload.dialects.detect import read_settings
from evenload.errors import EvenloadError, Notice, shown
from evenload.model.presets import model_source
from evenload.plan.plan import Plan
from evenload.profile.measured import Measured
from evenload.profile.profile import Profile
from evenload.record import require_torch
from evenload.units import human_count, plural

if TYPE_CHECKING:
    from evenload.profile.traced import TracedModel
    from evenload.setup import DType, Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """A traced or measured model and everything said about its training."""

    model: TracedModel | Measured
    plan: Plan
    limit: int | None
    notices: tuple[Notice, ...]

    @property
    def profile(self) -> Profile:
        """What the layers cost under the plan's setup."""
        return self.profile_of(self.plan.setup)

    def profile_of(self, setup: Setup) -> Profile:
        """What they cost under another setup with the same micro-batches.

        Raises:
            EvenloadError: the setup would divide layers, or needs another trace.
        """
        if setup.micro_batch != self.plan.setup.micro_batch:
            raise EvenloadError(
                "another micro-batch needs another trace",
                where="$.micro_batch",
                fix=f"leave it at {self.plan.setup.micro_batch}",
            )
        return self.model.profile(setup, self.plan.policy)

    @property
    def heading(self) -> str:
        """What it is, in one line."""
        setup = self.plan.setup
        count = len(self.model.kinds)
        stages = f"pp {setup.pp}" if setup.pp > 1 else "one device"
        if setup.interleave > 1:
            stages += f" x {setup.interleave} chunks a stage"
        within = f"in {self.model.path}" if self.model.path else "of the model itself"
        return (
            f"{self.model.name}: {human_count(self.model.parameters)} parameters, {plural(count, 'layer')} "
            f"{within}, {stages}, {plural(setup.micro_batches, 'micro-batch', 'micro-batches')} a step, "
            f"{'measured' if isinstance(self.model, Measured) else 'traced'}"
        )


def function_named(name: str) -> bool:
    """Whether a model argument names a function, or a settings file whose model is one."""
    source = model_source(name)
    if source != "settings":
        return source == "module"
    own = read_settings(name)
    return own.model_config is None and _is_function(own.plan.model)


def _is_function(name: str | None) -> bool:
    if not name or ":" not in name:
        return False
    try:
        return model_source(name) == "module"
    except EvenloadError:
        return False


def refuse_tracing(tracing: Tracing, model: str) -> None:
    """Make sure that nothing is said about a function where there is none.

    Raises:
        EvenloadError: an option about functions was given.
    """
    for name in ("input", "step", "layers"):
        if getattr(tracing, name):
            flag = f"--{name}"
            raise EvenloadError(
                f"{flag} is for functions; {model} is described by its configuration",
                where=flag,
                fix="name a function, package.module:function, or leave it out",
            )


def autocast_type(tracing: Tracing) -> DType | None:
    """The type of matrix products under autocast; None without.

    Raises:
        EvenloadError: autocast has no such type.
    """
    names: dict[str, DType] = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
    if tracing.autocast is None:
        return None
    found = names.get(tracing.autocast.lower())
    if found is None:
        raise EvenloadError(
            f"{shown(tracing.autocast)} is no type of autocast", where="--autocast", fix="use bf16, fp16"
        )
    return found


def read_traced(name: str, flags: Flags, tracing: Tracing) -> Traced:
    """Trace a function's model, and read everything said about its training.

    Raises:
        EvenloadError: flags about what the function decides, no repeated layers, or code that cannot run in a dry run.
    """
    require_torch()
    own = read_settings(name) if model_source(name) == "settings" else None
    reading = read_settings(flags.config) if flags.config else own
    function = own.plan.model if own is not None and own.plan.model else name
    refuse_meaningless(flags, function, TRACE)
    setup, notices = read_setup(reading, flags)
    model = _trace(function, setup, flags, tracing)
    layout, said = read_layout(function, len(model.kinds), setup, reading, flags)
    warned = [*(reading.notices if reading else ()), *notices, *said]
    plan = Plan(setup=setup, layout=layout, policy=read_policy(reading, layout, flags), model=function)
    return Traced(model=model, plan=plan, limit=read_limit(reading, flags), notices=tuple(warned))


def _trace(function: str, setup: Setup, flags: Flags, tracing: Tracing) -> TracedModel:
    from evenload.recompute.trace_model import trace_model  # noqa: PLC0415  # imports torch
    from evenload.record.dryrun import preparing  # noqa: PLC0415
    from evenload.record.functions import find_dtype, load_function  # noqa: PLC0415

    build = load_function(function)
    step = load_function(tracing.step) if tracing.step else None
    if step is not None:
        refuse_beside_step(step, _given(flags, tracing))
    prepare = preparing(
        build,
        step,
        device="cuda",
        inputs=example_inputs(tuple(tracing.input or ()), micro_batch=setup.micro_batch, seq=_tokens(setup, flags)),
        optimizer=setup.optimizer,
        micro_batches=min(setup.micro_batches, 2),
        insist=bool(tracing.input) or flags.seq is not None,
        autocast=find_dtype(autocast_type(tracing), "--autocast"),
    )
    return trace_model(prepare, name=function, layers=tracing.layers)


def _given(flags: Flags, tracing: Tracing) -> list[str]:
    """Options of the step that were given; a trace does not need the number of micro-batches from a step."""
    said = {"--autocast": tracing.autocast, "--optimizer": flags.optimizer, "--input": tracing.input}
    return [name for name, value in said.items() if value]


def _tokens(setup: Setup, flags: Flags) -> int | None:
    """Tokens of a sequence, where somebody said how many."""
    return setup.seq if flags.seq is not None or flags.config is not None else None


def example_inputs(shapes: tuple[str, ...], *, micro_batch: int, seq: int | None) -> Callable[[Any], Any] | Any:
    """What a model is called with: tensors of the given shapes, or tokens where `seq` says how many; None: not said."""
    from evenload.record.functions import shaped  # noqa: PLC0415  # imports torch

    if shapes:
        return shaped(shapes, where="--input")
    if seq is None:
        return None
    from evenload.record.hugging_face import token_batches  # noqa: PLC0415

    def batch(model: Any) -> Any:
        return token_batches(model, micro_batch=micro_batch, seq=seq, device="cpu")()

    return batch
