"""Which flags mean something for a function of the user's, in the one place that says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from evenload.cli.flags import Flags
from evenload.errors import EvenloadError

DRY_RUN: Final = frozenset({"micro_batch", "micro_batches", "seq", "optimizer", "hardware", "memory"})
"""Flags that mean something for a dry run of what a function builds; hardware says the limit."""
TRACE: Final = DRY_RUN | {"pp", "interleave", "schedule", "offset", "recompute", "config"}
"""Flags that mean something where the layers of a traced function are laid out: also those of layout and recompute."""
_FIXES: Final[Mapping[str, str]] = {
    "dtype": "build the model in that type, or train it under --autocast",
    "attention": "choose it where the function builds the model",
    "recompute": "evenload estimate says what recompute of traced layers changes; in a dry run, let the function do it",
    **dict.fromkeys(
        ("pp", "interleave", "schedule", "offset", "config"),
        "evenload estimate and evenload plan deal traced layers to stages",
    ),
}


def refuse_meaningless(flags: Flags, function: str, meant: frozenset[str]) -> None:
    """Make sure that every flag that was given means something for a function.

    Args:
        flags: what the user said.
        function: the function, for the message.
        meant: fields of `Flags` that mean something, `DRY_RUN` or `TRACE`.

    Raises:
        EvenloadError: the first flag that does not.
    """
    for name in flags.said():
        if name not in meant:
            flag = f"--{name.replace('_', '-')}"
            raise EvenloadError(
                f"{flag} is for configurations; {function} decides that itself",
                where=flag,
                fix=_FIXES.get(name, f"leave {flag} out"),
            )


def refuse_beside_step(step: Callable[..., object], given: Collection[str]) -> None:
    """Make sure that nothing is said about a step that the user's own step decides.

    Args:
        step: the user's step.
        given: options that were given.

    Raises:
        EvenloadError: the first of them that the step does not look at.
    """
    from evenload.record.training import wants_batch, wants_optimizer  # noqa: PLC0415  # imports torch

    unused = ["--micro-batches", "--autocast"]
    unused += [] if wants_optimizer(step) else ["--optimizer", "--adamw"]
    unused += [] if wants_batch(step) else ["--input", "--seq"]
    for flag in unused:
        if flag in given:
            raise EvenloadError(
                f"{flag} says nothing beside --step, which is the whole step", where=flag, fix=f"leave {flag} out"
            )
