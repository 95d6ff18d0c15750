"""How a plan is trained: data, optimizer, checkpoints. What a settings file says, and what flags say over it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from evenload.dialects.typed import decode
from evenload.dialects.yaml_source import read_yaml
from evenload.errors import EvenloadError, did_you_mean, shown

AdamW = Literal["fused", "foreach", "loop"]
Decay = Literal["constant", "linear", "cosine"]
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "adamw": ("fused", "foreach", "loop"),
    "decay": ("constant", "linear", "cosine"),
    "implementation": ("auto", "transformers", "reference"),
}
_LEAST: Final = {
    "steps": 1,
    "accumulation": 1,
    "warmup": 0,
    "checkpoint_every": 1,
    "keep": 1,
    "log_every": 1,
    "collect_every": 1,
    "timeout": 1,
    "seed": 0,
}
_NUMBERS: Final = ("learning_rate", "weight_decay", "clip", "beta1", "beta2", "epsilon")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """One training run."""

    data: tuple[str, ...] = ()
    """Files: text, read as bytes, or `.bin` of token numbers. Relative paths begin at the settings file."""
    steps: int = 100
    """Steps of the optimizer, those of the run before a resumption included."""
    accumulation: int = 1
    """Steps of the schedule for one of the optimizer."""
    learning_rate: float = 3e-4
    warmup: int = 0
    """Steps in which the learning rate rises from 0."""
    decay: Decay = "constant"
    """How it falls after that, to 0 at the last step."""
    weight_decay: float = 0.1
    """Of parameters of two dimensions and more."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    adamw: AdamW = "fused"
    """Form of AdamW."""
    clip: float | None = None
    """Largest norm of all gradients together; None: as they are."""
    autocast: Literal["bf16", "fp16"] | None = None
    """Type of forward under autocast; parameters stay in the plan's."""
    seed: int = 0
    """Of the first values, of the order of the data, and of dropout."""
    checkpoints: str | None = None
    """Directory of checkpoints; None: none are written."""
    checkpoint_every: int | None = None
    """Steps between two; None: only at the end, and when the run is told to stop."""
    keep: int = 2
    """Newest checkpoints that stay."""
    resume: bool = False
    """Go on from the newest checkpoint in the directory, if there is one."""
    log_every: int = 10
    """Steps between two log lines."""
    log_file: str | None = None
    """File that gets every step as a line of JSON."""
    predict: bool = True
    """Rehearse every rank's step before the first, and tell its peak beside the one that is measured."""
    memory_file: str | None = None
    """File that gets the predicted peaks before the first step, and later the measured ones beside them; None: a new
    `evenload-memory.json` in the directory of checkpoints, or else in the working directory."""
    collect_every: int | None = None
    """Steps between two runs of Python's garbage collector, which then never runs by itself."""
    layers: str | None = None
    """Path of what holds the repeated layers, where it is not obvious."""
    implementation: Literal["auto", "transformers", "reference"] = "auto"
    """Whose code the model is; `auto`: transformers where it is installed, else the built-in model."""
    timeout: int = 600
    """Seconds after which ranks give up waiting for each other."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", tuple(self.data))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
                raise EvenloadError(
                    f"{name} is {shown(value)}", where=f"$.{name}", fix=f"give a whole number from {least} on"
                )
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise EvenloadError(f"{name} is {shown(value)}", where=f"$.{name}", fix="give a number of at least 0")
        for name, known in _WORDS.items():
            if (value := getattr(self, name)) not in known:
                fix = did_you_mean(str(value), list(known)) or f"use one of {', '.join(known)}"
                raise EvenloadError(f"{name} is {shown(value)}", where=f"$.{name}", fix=fix)
        if self.autocast not in {None, "bf16", "fp16"}:
            raise EvenloadError(f"autocast is {shown(self.autocast)}", where="$.autocast", fix="use bf16 or fp16")
        if not self.beta1 < 1 or not self.beta2 < 1:
            raise EvenloadError(f"betas are {self.beta1}, {self.beta2}", where="$.beta1", fix="give numbers below 1")
        if self.checkpoints is None and (self.resume or self.checkpoint_every is not None):
            raise EvenloadError(
                "there is no directory of checkpoints", where="$.checkpoints", fix="name one: --checkpoints DIRECTORY"
            )

    def over(self, said: Mapping[str, Any]) -> RunSettings:
        """The settings with what was said laid over them.

        Raises:
            EvenloadError: a value that a run cannot have.
        """
        return replace(self, **dict(said))


def read_run(path: str | Path) -> RunSettings:
    """The settings of a run in a file, in YAML.

    Raises:
        EvenloadError: with `file:line:column`.
    """
    settings = decode(read_yaml(path), (), RunSettings)
    beside = Path(path).parent
    return replace(
        settings,
        data=tuple(_beside(one, beside) for one in settings.data),
        checkpoints=None if settings.checkpoints is None else _beside(settings.checkpoints, beside),
        memory_file=None if settings.memory_file is None else _beside(settings.memory_file, beside),
        log_file=None if settings.log_file is None else _beside(settings.log_file, beside),
    )


def names() -> tuple[str, ...]:
    """What a settings file may say."""
    return tuple(field.name for field in fields(RunSettings))


def _beside(name: str, directory: Path) -> str:
    """A path as it is shown. Links are followed first: `..` means the directory above the one that a link leads to."""
    path, here = Path(os.path.normpath(directory.resolve() / name)), Path.cwd().resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
