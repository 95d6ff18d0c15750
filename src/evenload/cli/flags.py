"""How a run is described on the command line: the flags that several verbs share, defined once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Final, get_type_hints

import typer

from evenload.errors import EvenloadError, Notice, relocate
from evenload.setup import Setup

_FIELD: Final = re.compile(r"\$\.(\w+)")
_TYPES: Final = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float8": "fp8",
}
"""Names of data types in PyTorch and MindSpore."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """What the user said; None is "not said". Names are those of `Setup` and of `Inputs`."""

    tp: Annotated[int | None, typer.Option("--tp", help="Tensor-parallel degree.")] = None
    pp: Annotated[int | None, typer.Option("--pp", help="Pipeline stages.")] = None
    interleave: Annotated[int | None, typer.Option("--interleave", help="Chunks per pipeline stage.")] = None
    dp: Annotated[int | None, typer.Option("--dp", help="Data-parallel replicas, not counting --cp.")] = None
    cp: Annotated[int | None, typer.Option("--cp", help="Context-parallel degree: divides the sequence.")] = None
    ep: Annotated[int | None, typer.Option("--ep", help="Expert-parallel degree.")] = None
    etp: Annotated[int | None, typer.Option("--etp", help="Tensor-parallel degree inside one expert.")] = None
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", help="Sequences in one micro-batch.")] = None
    micro_batches: Annotated[int | None, typer.Option("--micro-batches", help="Micro-batches per step.")] = None
    seq: Annotated[int | None, typer.Option("--seq", help="Tokens per sequence.")] = None
    dtype: Annotated[str | None, typer.Option("--dtype", help="Parameters and activations: bf16, fp16, fp32, fp8.")] = (
        None
    )
    grad_dtype: Annotated[str | None, typer.Option("--grad-dtype", help="Type of accumulated gradients.")] = None
    master_weights: Annotated[
        bool | None, typer.Option("--master-weights/--no-master-weights", help="fp32 main copies of the parameters.")
    ] = None
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="adamw, sgd or none.")] = None
    optimizer_dtype: Annotated[str | None, typer.Option("--optimizer-dtype", help="Type of the moments.")] = None
    zero: Annotated[int | None, typer.Option("--zero", help="ZeRO stage 0 to 3; 3 is FSDP.")] = None
    sequence_parallel: Annotated[
        bool | None,
        typer.Option("--sequence-parallel/--no-sequence-parallel", help="Divide activations by --tp between products."),
    ] = None
    attention: Annotated[str | None, typer.Option("--attention", help="sdpa (fused) or eager.")] = None
    backend: Annotated[str | None, typer.Option("--backend", help="torch, megatron or mindspore.")] = None
    schedule: Annotated[str | None, typer.Option("--schedule", help="Pipeline schedule, such as 1f1b or gpipe.")] = None
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="A device, such as h100, or a JSON or YAML file.")
    ] = None
    recompute: Annotated[
        str | None, typer.Option("--recompute", help="On every layer: none, full, select, comm or both.")
    ] = None
    offset: Annotated[
        str | None,
        typer.Option("--offset", help="Layers above the even share: a number, \\[stage] or \\[chunk]\\[stage]."),
    ] = None
    memory: Annotated[str | None, typer.Option("--memory", help="Limit of one device, such as 64GiB or 80GB.")] = None
    config: Annotated[str | None, typer.Option("--config", help="Settings file that the flags are laid over.")] = None

    def over(self, setup: Setup) -> Setup:
        """The setup with what was said laid over it.

        Raises:
            EvenloadError: a value that a setup cannot have.
        """
        names = {field.name for field in fields(Setup)}
        said = {name: value for name, value in self.said().items() if name in names}
        for name in ("dtype", "grad_dtype", "optimizer_dtype"):
            if name in said:
                said[name] = _TYPES.get(said[name].lower(), said[name].lower())
        return replace(setup, **said)

    def said(self) -> dict[str, Any]:
        """The flags that were given."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def named(self, error: EvenloadError) -> EvenloadError:
        """The error with the flag in place of the path of a setup's field: the user typed a flag."""
        flag = self._flag(error.where)
        return error.at(flag) if flag else error

    def noticed(self, notice: Notice) -> Notice:
        """The notice with the flag in place of the path of a setup's field."""
        flag = self._flag(notice.where)
        return relocate(notice, flag) if flag else notice

    def _flag(self, where: str | None) -> str | None:
        """The flag that was given for a field of the setup."""
        found = _FIELD.match(where or "")
        return f"--{found[1].replace('_', '-')}" if found and found[1] in self.said() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracing:
    """How a function of the user's is run, where a verb takes one for a model."""

    input: Annotated[
        list[str] | None,
        typer.Option("--input", help="Of a function: shape of an argument of its model, 8x3x224x224 or 4x512:int64."),
    ] = None
    step: Annotated[
        str | None, typer.Option("--step", help="Of a function: package.module:function, the step in place of ours.")
    ] = None
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="Of a function: path of the list of repeated layers, by default the largest."),
    ] = None
    autocast: Annotated[
        str | None, typer.Option("--autocast", help="Type of matrix products under torch.autocast: bf16 or fp16.")
    ] = None


_SHARED: Final[dict[str, Any]] = {"flags": Flags, "tracing": Tracing}
"""Parameters of a verb that stand for options, and where these are written down."""


def with_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb with a parameter `flags: Flags`, or `tracing: Tracing`, an option for each field.

    Typer reads options from a function's signature; this writes them there, so that every verb has the same ones.
    """
    own = inspect.signature(verb)
    hints = get_type_hints(verb, include_extras=True)
    shared = {name: kind for name, kind in _SHARED.items() if name in own.parameters}
    parameters = [
        parameter.replace(annotation=hints[name]) for name, parameter in own.parameters.items() if name not in shared
    ]
    for kind in reversed(shared.values()):
        options = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=options[field.name]
            )
            for field in fields(kind)
        ]

    def run(**given: Any) -> None:
        values = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in shared.items()
        }
        try:
            verb(**given, **values)
        except EvenloadError as error:
            raise values["flags"].named(error) from None

    run.__doc__ = verb.__doc__
    run.__name__ = verb.__name__
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
