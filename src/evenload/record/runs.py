"""Records training steps in a rehearsal: of all layers, or of few that stand for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from evenload.errors import EvenloadError
from evenload.ledger.ledger import Ledger, Mark
from evenload.ledger.words import MarkKind
from evenload.record.dedup import expand
from evenload.record.failures import explained
from evenload.record.layers import Layers, find_layers, only, recompute_layers, repeated_layers
from evenload.record.rehearsal import Rehearsal
from evenload.record.training import Training
from evenload.simulate.composition import Reduction, reduction


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A model in a rehearsal, and how it is trained."""

    model: nn.Module
    training: Training
    optimizer: Callable[[nn.Module], torch.optim.Optimizer | None]
    """Makes the optimizer of the parameters that the model has when it is called."""
    recompute: frozenset[int] = field(default=frozenset())
    """Layers whose forward runs again in backward."""
    whole: bool = False
    """All layers have to run: something holds the model from outside."""
    reduced: Callable[[str, Reduction], None] | None = None
    """Told the path of the list and which layers stand for all, when only those ran."""


def record_steps(
    rehearsal: Callable[[], Rehearsal],
    prepare: Callable[[Rehearsal], Prepared],
    *,
    steps: int,
    full: bool,
    layers: str | None = None,
) -> Ledger:
    """Record training steps.

    Args:
        rehearsal: makes a place to run them in.
        prepare: builds what runs, in that place.
        steps: how many.
        full: run every layer. Otherwise layers that do exactly what others do are not run, where there are such; the
            ledger is the same, event for event.
        layers: module path of the list of repeated layers; None: the largest list there is.

    Raises:
        EvenloadError: there is no list of layers at the path, or the code that runs fails.
    """
    if not full:
        with rehearsal() as place, explained(place):
            prepared = prepare(place)
            found = _found(prepared, layers)
            reduced = None if found is None else _reduced(found, prepared)
            if found is not None and reduced is not None and reduced.reduces and not prepared.whole:
                ledger = _few(place, prepared, found, reduced, steps)
                if ledger is not None:
                    return ledger
    with rehearsal() as place, explained(place):
        prepared = prepare(place)
        if prepared.recompute:
            recompute_layers(find_layers(prepared.model, layers), prepared.recompute)
        _record(place, prepared, steps)
    return place.ledger


def _few(place: Rehearsal, prepared: Prepared, found: Layers, reduced: Reduction, steps: int) -> Ledger | None:
    """The ledger of all layers from a run of few of them; None where that is not possible."""
    recompute_layers(found, prepared.recompute)
    try:
        with explained(place), only(prepared.model, found, reduced.traced):
            _record(place, prepared, steps)
        whole = expand(place.ledger, found.path, reduced)
    except EvenloadError:
        return None
    if prepared.reduced is not None:
        prepared.reduced(found.path, reduced)
    text = f"traced layers {', '.join(map(str, reduced.traced))} of {len(reduced.source)}"
    note = Mark(kind=MarkKind.NOTE, index=0, time=0, text=text)
    return replace(whole, marks=(note, *whole.marks))


def _found(prepared: Prepared, path: str | None) -> Layers | None:
    """The repeated layers; None where there are none and nobody asked for them."""
    return repeated_layers(prepared.model) if path is None else find_layers(prepared.model, path)


def _reduced(found: Layers, prepared: Prepared) -> Reduction:
    return reduction([(kind, number in prepared.recompute) for number, kind in enumerate(found.kinds)])


def _record(place: Rehearsal, prepared: Prepared, steps: int) -> None:
    model, optimizer = prepared.model, prepared.optimizer(prepared.model)
    with place.recorded(model, optimizer) as count:
        count.told = True
        for _ in range(steps):
            prepared.training.step(model, optimizer)
            count.end()
