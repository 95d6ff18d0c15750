"""`evenload dryrun`: training steps as the device would run them, without the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenload.cli._shared import ForceFlag, JsonFlag, VerboseFlag, remark, say, say_json, warn
from evenload.cli.flags import Flags, with_flags
from evenload.cli.functions import DRY_RUN, refuse_beside_step, refuse_meaningless
from evenload.cli.inputs import read_inputs, read_limit, read_setup
from evenload.cli.traced import example_inputs
from evenload.errors import ANSWER_NO, EvenloadError, Notice, did_you_mean, shown
from evenload.model.presets import model_source
from evenload.record import require_torch
from evenload.record.targets import find_target
from evenload.report.dryrun import DryRun, as_json, as_text
from evenload.report.dryrun_ranks import as_json as ranks_as_json
from evenload.report.dryrun_ranks import as_text as ranks_as_text

if TYPE_CHECKING:
    from evenload.ledger.ledger import Ledger
    from evenload.runtime.collectives import Collective

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:function that builds a model, a preset, a config.json, or a settings file.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What only this verb is told."""

    device: str
    steps: int
    autocast: str | None
    optimizer: str | None
    step: str | None
    inputs: tuple[str, ...]
    full: bool
    layers: str | None
    rank: int | None
    real: bool
    count: int | None
    """Layers that really run; None: all."""

    def given(self, flags: Flags) -> frozenset[str]:
        """Options of a run's step that were given."""
        said = {
            "--micro-batches": flags.micro_batches is not None,
            "--autocast": self.autocast is not None,
            "--optimizer": flags.optimizer is not None,
            "--adamw": self.optimizer is not None,
            "--input": bool(self.inputs),
            "--seq": flags.seq is not None,
        }
        return frozenset(name for name, is_given in said.items() if is_given)


@with_flags
def run(
    target: TargetArgument,
    *,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Device that the run is for: cuda (the default), npu, xpu or cpu."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Training steps; the second is what later ones are like.")] = 2,
    autocast: Annotated[
        str | None, typer.Option("--autocast", help="Type of forward under autocast: bf16, fp16.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option("--adamw", help="Form of AdamW: foreach (the default on a GPU), fused or loop.")
    ] = None,
    step: Annotated[
        str | None, typer.Option("--step", help="package.module:function, the step in place of ours.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="Shape of an argument of the model: 8x3x224x224, or 4x512:int64."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Run every layer, also those that do what others do.")] = False,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            help="Path of the list of repeated layers, by default the largest; with --real also how many of them run.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", help="Rank of a plan for several devices; without, the first of each pipeline stage."),
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Run in earnest, on a device that is here: for code that looks at its data.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Ledger to write.")] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
    flags: Flags,
) -> None:
    """Run training steps as a device would, without the device and its memory; say what they would allocate."""
    require_torch()
    count, path = _layers(layers, real=real)
    if full and layers is not None:
        raise EvenloadError(
            "--full runs all layers, and --layers says which list stands for few", where="--full", fix="leave one out"
        )
    device = device or _device(real=real)
    asked = _Asked(
        device=device,
        steps=_positive(steps, "--steps"),
        autocast=autocast,
        optimizer=_adamw(kernel),
        step=step,
        inputs=tuple(inputs or ()),
        full=full,
        layers=path,
        real=real,
        count=count,
        rank=rank,
    )
    _named(device)
    if out is not None and out.exists() and not force:
        raise EvenloadError("the file exists and would be overwritten", where=str(out), fix="add --force")
    function = model_source(target) == "module"
    runs, notices = (
        _of_function(target, asked, flags) if function else _of_plan(target, asked, flags, one=out is not None)
    )
    notices = tuple(dict.fromkeys((*notices, *(notice for answer in runs for notice in answer.notices))))
    warn(notices)
    if len(runs) > 1:
        say_json(ranks_as_json(runs) | {"warnings": notices}) if json else say(ranks_as_text(runs))
        raise typer.Exit(ANSWER_NO if any(answer.fits is False for answer in runs) else 0)
    (answer,) = runs
    ledger = answer.ledger
    if out is not None:
        from evenload.ledger.files import write_ledger  # noqa: PLC0415  # only with --out

        write_ledger(out, ledger, force=force)
        remark(f"wrote {out}")
    if json:
        more = {"choices": answer.target.choices} if verbose else {}
        say_json(as_json(answer) | more | {"warnings": notices})
    else:
        say(as_text(answer, verbose=verbose))
    if answer.fits is False:
        raise typer.Exit(ANSWER_NO)


def _of_plan(target: str, asked: _Asked, flags: Flags, *, one: bool) -> tuple[list[DryRun], tuple[Notice, ...]]:
    """The dry runs of a configuration or a settings file: of one device, of one rank, or of one rank of each stage."""
    for value, name in ((asked.step, "--step"), (asked.inputs, "--input"), (asked.layers, "--layers")):
        if value:
            raise EvenloadError(
                f"{name} is for functions; {target} is trained on tokens",
                where=name,
                fix="name a function, package.module:function, or leave it out",
            )
    inputs = read_inputs(target, flags)
    setup = inputs.plan.setup
    from evenload.record.functions import find_dtype  # noqa: PLC0415  # imports torch

    how: dict[str, Any] = {
        "device": asked.device,
        "steps": asked.steps,
        "autocast": find_dtype(asked.autocast, "--autocast"),
        "full": asked.full,
        "optimizer": _optimizer(asked, setup.optimizer),
    }
    goes: list[Callable[[], tuple[Ledger, tuple[Collective, ...]]]]
    if setup.devices == 1 and not asked.rank:
        from evenload.record.planned import prepare_plan  # noqa: PLC0415  # imports torch

        alone = prepare_plan(inputs.config, inputs.plan, real=asked.real, count=asked.count, **how)
        goes = [lambda: (alone(), ())]
    else:
        if asked.real:
            raise EvenloadError(
                "a plan for several devices cannot run for real here",
                where="--real",
                fix="leave out --real, which needs no devices then, or the degrees",
            )
        from evenload.runtime.dryrun import first_rank, prepare_rank  # noqa: PLC0415  # imports torch

        if asked.rank is None and one and setup.pp > 1:
            raise EvenloadError(
                f"a ledger is of one rank, and the plan has {setup.pp} stages", where="--out", fix="say which by --rank"
            )
        ranks = [first_rank(stage, setup) for stage in range(setup.pp)] if asked.rank is None else [asked.rank]
        goes = [prepare_rank(inputs.config, inputs.plan, rank=rank, **how) for rank in ranks]
    runs: list[DryRun] = []
    for go in goes:
        start = time.perf_counter()
        ledger, collectives = go()
        runs.append(
            DryRun(
                ledger=ledger,
                target=find_target(asked.device),
                seconds=time.perf_counter() - start,
                title=target,
                limit=inputs.limit,
                collectives=collectives,
            )
        )
    return runs, inputs.notices


def _of_function(target: str, asked: _Asked, flags: Flags) -> tuple[list[DryRun], tuple[Notice, ...]]:
    """The dry run of what a function builds."""
    if asked.rank is not None:
        raise EvenloadError(
            f"--rank is for configurations; {target} divides its model itself", where="--rank", fix="leave it out"
        )
    refuse_meaningless(flags, target, DRY_RUN)
    _refuse_unused(asked, flags)
    setup, _ = read_setup(None, flags)
    from evenload.record.dryrun import dryrun, real_run  # noqa: PLC0415  # imports torch
    from evenload.record.functions import find_dtype, load_function  # noqa: PLC0415

    build = load_function(target)
    own = load_function(asked.step) if asked.step else None
    if own is not None:
        refuse_beside_step(own, asked.given(flags))
    limit = read_limit(None, flags)
    run_it = partial(real_run, count=asked.count) if asked.real else partial(dryrun, full=asked.full)
    start = time.perf_counter()
    ledger = run_it(
        build,
        own,
        device=asked.device,
        inputs=example_inputs(asked.inputs, micro_batch=setup.micro_batch, seq=flags.seq),
        optimizer=_optimizer(asked, setup.optimizer),
        steps=asked.steps,
        micro_batches=setup.micro_batches,
        layers=asked.layers,
        autocast=find_dtype(asked.autocast, "--autocast"),
    )
    seconds = time.perf_counter() - start
    place = find_target(asked.device)
    return [DryRun(ledger=ledger, target=place, seconds=seconds, title=target, limit=limit)], ()


def _refuse_unused(asked: _Asked, flags: Flags) -> None:
    """Make sure that nothing is said about inputs, or about AdamW, that is not looked at."""
    for name, given in (("--seq", flags.seq), ("--micro-batch", flags.micro_batch)):
        if given is not None and asked.inputs:
            raise EvenloadError(
                f"{name} says nothing beside --input, which gives whole shapes", where=name, fix="leave one of them out"
            )
    if flags.micro_batch is not None and flags.seq is None:
        raise EvenloadError(
            "--micro-batch counts sequences of tokens, and nothing says how long they are",
            where="--micro-batch",
            fix="add --seq, or give whole shapes by --input",
        )


def _layers(text: str | None, *, real: bool) -> tuple[int | None, str | None]:
    """How many layers run, and the path of their list: `4`, `model.layers`, or both as `model.layers:4`."""
    if text is None:
        return None, None
    path, _, number = text.rpartition(":")
    if not number.isdecimal():
        return None, text
    if not real:
        raise EvenloadError(
            f"--layers {text} is a number of layers that really run",
            where="--layers",
            fix="add --real; a dry run chooses by itself, or runs all with --full",
        )
    return int(number[:6]), path or None


def _device(*, real: bool) -> str:
    """The device that a run is for where nobody says."""
    if not real:
        return "cuda"
    from evenload.record.real import default_device  # noqa: PLC0415  # imports torch

    return default_device()


def _named(device: str) -> None:
    """Make sure that there is such a device; the user typed a flag, and not a field."""
    try:
        find_target(device)
    except EvenloadError as error:
        raise error.at("--device") from None


def _adamw(kernel: str | None) -> str | None:
    if kernel is None or kernel in {"foreach", "fused", "loop"}:
        return kernel
    hint = did_you_mean(kernel, ["foreach", "fused", "loop"])
    raise EvenloadError(f"AdamW has no form {shown(kernel)}", where="--adamw", fix=hint or "use foreach, fused or loop")


def _optimizer(asked: _Asked, chosen: str) -> Any:
    if asked.optimizer is None:
        return chosen
    if chosen != "adamw":
        raise EvenloadError(
            f"--adamw is a form of AdamW, and the optimizer is {chosen}", where="--adamw", fix="leave it out"
        )
    return "adamw" if asked.optimizer == "foreach" else f"adamw-{asked.optimizer}"


def _positive(number: int, name: str) -> int:
    if not 1 <= number <= 1000:
        raise EvenloadError(f"{number} is not possible", where=name, fix="give a whole number from 1 to 1000")
    return number
