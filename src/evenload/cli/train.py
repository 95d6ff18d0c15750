"""`evenload train`: run a plan."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenload.cli._shared import JsonFlag, end_silently, remark, say, say_json, warn
from evenload.cli.flags import Flags, with_flags
from evenload.cli.inputs import profile_beside, read_inputs, read_layout, read_policy, read_setup
from evenload.cli.traced import function_named
from evenload.dialects.detect import read_settings
from evenload.errors import WRONG_INPUT, EvenloadError, Notice
from evenload.model.presets import model_source
from evenload.plan.plan import Plan
from evenload.profile.measured import digest_of
from evenload.profile.measured_file import load_measured
from evenload.record import require_torch

if TYPE_CHECKING:
    from evenload.runtime.settings import RunSettings
    from evenload.runtime.train import Ended

INTERRUPTED = 130


@with_flags
def run(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan, or a model with the flags below.")],
    *,
    profile: Annotated[
        str | None, typer.Option("--profile", help="A measured profile, for the time of a step; by default the plan's.")
    ] = None,
    settings: Annotated[
        str | None, typer.Option("--settings", help="YAML file with the settings of the run; flags are laid over it.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", help="Text files, read as bytes, or .bin files of token numbers.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Steps of the optimizer.")] = None,
    accumulation: Annotated[
        int | None, typer.Option("--accumulation", help="Steps of the schedule for one of the optimizer.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate")] = None,
    warmup: Annotated[int | None, typer.Option("--warmup", help="Steps in which the learning rate rises.")] = None,
    decay: Annotated[str | None, typer.Option("--decay", help="constant, linear or cosine.")] = None,
    weight_decay: Annotated[float | None, typer.Option("--weight-decay")] = None,
    adamw: Annotated[str | None, typer.Option("--adamw", help="Form of AdamW: fused, foreach or loop.")] = None,
    clip: Annotated[float | None, typer.Option("--clip", help="Largest norm of all gradients together.")] = None,
    autocast: Annotated[
        str | None, typer.Option("--autocast", help="Type of forward under autocast: bf16, fp16.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    checkpoints: Annotated[str | None, typer.Option("--checkpoints", help="Directory of checkpoints.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", help="Steps between two checkpoints.")
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", help="Newest checkpoints that stay.")] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume/--no-resume", help="Go on from the newest checkpoint.")
    ] = None,
    log_every: Annotated[int | None, typer.Option("--log-every", help="Steps between two log lines.")] = None,
    log_file: Annotated[str | None, typer.Option("--log-file", help="File that gets every step as JSON.")] = None,
    predict: Annotated[
        bool | None, typer.Option("--predict/--no-predict", help="Tell every rank's peak before it is reached.")
    ] = None,
    memory_file: Annotated[
        str | None, typer.Option("--memory-file", help="File for predicted and measured peaks, in place of a new one.")
    ] = None,
    collect_every: Annotated[
        int | None, typer.Option("--collect-every", help="Steps between two runs of Python's garbage collector.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Path of what holds the repeated layers, if not obvious.")
    ] = None,
    implementation: Annotated[
        str | None, typer.Option("--implementation", help="Whose model code: auto, transformers or reference.")
    ] = None,
    timeout: Annotated[int | None, typer.Option("--timeout", help="Seconds after which ranks give up waiting.")] = None,
    json: JsonFlag = False,
    flags: Flags,
) -> None:
    """Train under a plan: torchrun --nproc-per-node N -m evenload train PLAN --data FILES."""
    given = dict(locals())
    require_torch()
    from evenload.runtime.launch import Silent  # noqa: PLC0415  # imports torch
    from evenload.runtime.settings import RunSettings, names, read_run  # noqa: PLC0415
    from evenload.runtime.train import train  # noqa: PLC0415

    speaks = os.environ.get("RANK", "0") == "0"
    try:
        model, chosen, notices = _model(plan, flags)
        said = {name: given[name] for name in names() if given.get(name) is not None}
        run_settings = (read_run(settings) if settings else RunSettings()).over(said)
        step_time, doubts = _step_time(profile, plan, model, chosen, run_settings)
    except EvenloadError:
        if os.environ.get("LOCAL_RANK", "0") != "0":  # one voice on every machine, which may have files of its own
            end_silently(WRONG_INPUT)
        raise
    if speaks:
        warn((*notices, *doubts))
    try:
        ended = train(model, chosen, run_settings, step_time=step_time, say=remark if json else say)
    except Silent as silent:
        end_silently(silent.exit_code)
    if speaks:
        _tell(ended, json=json)
    if ended.signal == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


def _model(name: str, flags: Flags) -> tuple[Any, Plan, tuple[Notice, ...]]:
    """The model as a configuration or a function, how it is trained, and what to warn of."""
    if not function_named(name):
        inputs = read_inputs(name, flags)
        return inputs.config, inputs.plan, inputs.notices
    if model_source(name) == "module":
        raise EvenloadError(
            f"{name} says nothing of who holds which layer",
            where=name,
            fix="write a plan whose model is this function, such as `evenload plan` does, and name the plan",
        )
    from evenload.record.functions import load_function  # noqa: PLC0415  # imports torch

    reading = read_settings(name)
    function = str(reading.plan.model)
    setup, notices = read_setup(reading, flags)
    layout, said = read_layout(function, reading.plan.layout.num_layers, setup, reading, flags)
    policy, measured = read_policy(reading, layout, flags), profile_beside(reading, name)
    plan = Plan(setup=setup, layout=layout, policy=policy, model=function, profile=measured)
    return load_function(function), plan, (*reading.notices, *notices, *said)


def _step_time(
    profile: str | None, name: str, model: Any, plan: Plan, settings: RunSettings
) -> tuple[float | None, tuple[Notice, ...]]:
    """What a measured profile says of a step; one that only the plan names may be gone, or from another machine."""
    path = profile or plan.profile
    if path is None:
        return None, ()
    from evenload.runtime.pace import predicted_step  # noqa: PLC0415  # imports torch

    try:
        measured = load_measured(path)
        own = callable(model)
        measured.check_model(plan.model or name, digest_of(str(plan.model) if own else model))
        return predicted_step(measured, plan, settings, own=own), ()
    except EvenloadError as error:
        if profile is not None:
            raise
        return None, (Notice(fact=f"no step time is predicted: {error.fact}", where=path, fix=error.fix),)


def _tell(ended: Ended, *, json: bool) -> None:
    if ended.signal is not None:
        where = f", saved in {ended.saved}" if ended.saved else "; nothing is saved, because there is no --checkpoints"
        remark(f"stopped by {signal.Signals(ended.signal).name} after step {ended.step}{where}")
    if json:
        saved = None if ended.saved is None else str(ended.saved)
        say_json({"step": ended.step, "loss": ended.loss, "saved": saved, "step_time": ended.step_time})
