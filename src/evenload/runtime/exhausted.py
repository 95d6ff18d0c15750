"""What a rank says when it is out of memory: what it held, by category and module, beside what was predicted."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from evenload.errors import ANSWER_NO, EvenloadError, behind
from evenload.ledger.curve import live, shares
from evenload.ledger.failed import failures
from evenload.ledger.ledger import Ledger
from evenload.ledger.oom import OutOfMemory, read_oom
from evenload.ledger.words import Category, Phase
from evenload.runtime.memory import RankMemory
from evenload.runtime.pipeline import Pipeline
from evenload.units import human_bytes

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")
_STEP: Final = re.compile(r" of step \d+")
_ENFORCED: Final = re.compile(r"\[enforce fail at [^]]*\] err == 0\. ")
_MOST: Final = 4
"""Modules that are named."""
_SMALL: Final = 0.001
"""Share of what is held below which a difference from the prediction is not told."""
UNKNOWN: Final = "activations and all else"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exhausted:
    """What a rank had when there was no room for more. Bytes."""

    message: str
    """First line of the allocator's."""
    asked: int | None
    """What there was no room for; None: the message does not say."""
    held: Mapping[str, int]
    """By category."""
    modules: tuple[tuple[str, int], ...] = ()
    """Category and module that hold the most, all layers of one name together; empty: nothing has watched."""
    doing: str | None = None
    """What the step was doing."""


def message_of(error: BaseException | None) -> str | None:
    """What an allocator said, where an error or one behind it is that memory has run out; else None."""
    for one in behind(error):
        text = str(one)
        if isinstance(one, torch.OutOfMemoryError) or _read(text):
            line = next((line for line in text.splitlines() if _read(line)), text.partition("\n")[0])
            return _ENFORCED.sub("", line.strip())
        if isinstance(one, MemoryError):
            return text or "Python found no memory"
    return None


@contextmanager
def room(when: str) -> Generator[None]:
    """Say which rank is out of memory, and when, where nothing watches it yet.

    Raises:
        EvenloadError: it is.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = message_of(error)
        if message is None:
            raise
        raise EvenloadError(
            f"rank {distributed.get_rank()} is out of memory {when}: {message}",
            fix="give it fewer layers, or divide them by tp or zero 3",
            exit_code=ANSWER_NO,
        ) from error


def from_ledger(message: str, ledger: Ledger) -> Exhausted:
    """What was held, from a recording that saw the allocation fail, or else its end.

    What forward has made and still holds counts as activations: whether backward would have used it, nobody knows.
    """
    failed = failures(ledger)[-1:]
    rows = live(ledger, failed[0].event - 1 if failed else ledger.end)
    held: dict[str, int] = {}
    modules: dict[str, int] = {}
    for share in shares(ledger, rows, "category", "phase", "module"):
        category, phase, module = share.key
        if category == Category.TEMPORARY.value and phase == Phase.FORWARD.value:
            category = Category.ACTIVATION.value
        place = f"{category} of {_NUMBER.sub('*', module)}" if module else str(category)
        held[str(category)] = held.get(str(category), 0) + share.nbytes
        modules[place] = modules.get(place, 0) + share.nbytes
    return Exhausted(
        message=message,
        asked=failed[0].asked if failed else _asked(message),
        held=held,
        modules=tuple(sorted(modules.items(), key=lambda one: -one[1])[:_MOST]),
        doing=_STEP.sub("", failed[0].doing) if failed else None,
    )


def from_parts(message: str, pipeline: Pipeline, optimizer: torch.optim.Optimizer, allocated: int | None) -> Exhausted:
    """What is held by what is known without a recording.

    Args:
        message: the allocator's.
        pipeline: whose parameters and gradients count.
        optimizer: whose states count.
        allocated: of the device's allocator; None: nobody knows.
    """
    parameters = pipeline.parameters()
    held = {
        Category.PARAMETER.value: _nbytes(parameters),
        Category.GRADIENT.value: _nbytes(one.grad for one in parameters),
        Category.OPTIMIZER.value: _nbytes(chain.from_iterable(state.values() for state in optimizer.state.values())),
    }
    if allocated is not None:
        held[UNKNOWN] = max(0, allocated - sum(held.values()))
    return Exhausted(message=message, asked=_asked(message), held={k: v for k, v in held.items() if v})


def explained(found: Exhausted, predicted: RankMemory, where: str) -> EvenloadError:
    """The error that a rank ends with.

    Args:
        found: what it had.
        predicted: its peak, as it was before the run.
        where: rank, stage and step, in words.
    """
    return EvenloadError("\n".join(_lines(found, predicted, where)), fix=_fix(found, predicted), exit_code=ANSWER_NO)


def held_layers(pipeline: Pipeline) -> str:
    """Which layers a rank holds, in words."""
    own = [chunk.place.layers for chunk in pipeline.chunks]
    spans = [str(one.start) if len(one) == 1 else f"{one.start}-{one.stop - 1}" for one in own if one]
    return f"layers {', '.join(spans)}" if spans else "no layers"


def _lines(found: Exhausted, predicted: RankMemory, where: str) -> Iterator[str]:
    doing = f", in {found.doing}" if found.doing else ""
    yield f"{where} is out of memory{doing}: {found.message}"
    total = sum(found.held.values())
    more = "" if found.asked is None else f", and {human_bytes(found.asked)} more had no room"
    yield f"  held        {human_bytes(total)}: {_list(found.held.items())}{more}"
    if found.modules:
        yield f"  most        {_list(found.modules)}"
    if predicted.predicted is None:
        yield f"  predicted   nothing: {predicted.why or 'nobody asked for it'}"
        return
    yield f"  predicted   {human_bytes(predicted.predicted)} at the peak: {_list(predicted.held.items())}"
    yield f"  missed      {_missed(found, predicted)}"


def _missed(found: Exhausted, predicted: RankMemory) -> str:
    """What is held beyond the prediction."""
    needed = sum(found.held.values()) + (found.asked or 0)
    peak = max(predicted.predicted or 0, predicted.predicted_first or 0)
    if needed <= peak:
        return f"nothing: there was room for less than the {human_bytes(peak)} of the prediction"
    over = {name: nbytes - predicted.held.get(name, 0) for name, nbytes in found.held.items()}
    told = [(name, nbytes) for name, nbytes in over.items() if nbytes > _SMALL * needed]
    beyond = f"{human_bytes(needed - peak)} that the prediction does not have"
    return f"{beyond}: {_list(told)} more than at its peak" if told else beyond


def _fix(found: Exhausted, predicted: RankMemory) -> str:
    if predicted.predicted is None:
        return "plan with --memory below what a rank has, or recompute more"
    if sum(found.held.values()) + (found.asked or 0) <= predicted.predicted:
        return (
            f"give each rank more than {human_bytes(predicted.predicted)} and what the process itself takes, or plan "
            "again with --memory below what it has"
        )
    return "see what holds the rest: evenload track -o run.ledger; then plan again with --memory below what a rank has"


def _list(parts: Iterable[tuple[str, int]]) -> str:
    largest: Sequence[tuple[str, int]] = sorted(parts, key=lambda one: -one[1])
    return ", ".join(f"{human_bytes(nbytes)} {name}" for name, nbytes in largest) or "nothing"


def _asked(message: str) -> int | None:
    return next((one.asked for one in _read(message)), None)


def _read(text: str) -> tuple[OutOfMemory, ...]:
    """The messages of allocators in a text; there may be none."""
    try:
        return read_oom(text)
    except EvenloadError:
        return ()


def _nbytes(tensors: Iterable[Any]) -> int:
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            total += (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
    return total
