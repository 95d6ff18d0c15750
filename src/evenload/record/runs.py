"""Records training steps in a rehearsal: of all layers, or of few that stand for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from evenload.errors import EvenloadError, Notice
from evenload.ledger.ledger import Ledger, Mark
from evenload.ledger.words import MarkKind
from evenload.record.dedup import expand
from evenload.record.failures import explained
from evenload.record.layers import Layers, find_layers, only, recompute_layers, repeated_layers
from evenload.record.rehearsal import Rehearsal
from evenload.record.substitutes import substituted_in_libraries
from evenload.record.training import Training
from evenload.record.walk import Walk, odd_layer, walk
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
    notices: tuple[Notice, ...] = ()
    if not full:
        with rehearsal() as place, explained(place):
            prepared = prepare(place)
            found = _found(prepared, layers)
            if found is not None and not prepared.whole:
                ledger, notices = _composed(place, prepared, found, steps)
                if ledger is not None:
                    return ledger
    with rehearsal() as place, explained(place):
        prepared = prepare(place)
        if prepared.recompute:
            recompute_layers(find_layers(prepared.model, layers), prepared.recompute)
        _record(place, prepared, steps)
    return replace(place.ledger, notices=(*place.ledger.notices, *notices))


def _composed(
    place: Rehearsal, prepared: Prepared, found: Layers, steps: int
) -> tuple[Ledger | None, tuple[Notice, ...]]:
    """The ledger of all layers from a run of few, or None where that is not possible and why, where it surprises."""
    kinds = [(kind, number in prepared.recompute) for number, kind in enumerate(found.kinds)]
    reduced = reduction(kinds)
    ledger = _few(place, prepared, found, reduced, steps) if reduced.reduces else None
    if ledger is None:
        return None, ()
    with substituted_in_libraries(place.target):
        why = surprise(prepared, found, kinds, reduced)
    if why is not None:
        return None, (Notice(fact=f"all layers ran, because {why}"),)
    if prepared.reduced is not None:
        prepared.reduced(found.path, reduced)
    return ledger, ()


def _few(place: Rehearsal, prepared: Prepared, found: Layers, reduced: Reduction, steps: int) -> Ledger | None:
    """The ledger of all layers from a run of few of them; None where they turn out not to be alike."""
    recompute_layers(found, prepared.recompute)
    try:
        with explained(place), only(prepared.model, found, reduced.traced):
            _record(place, prepared, steps)
        whole = expand(place.ledger, found.path, reduced)
    except EvenloadError:
        return None
    text = f"traced layers {', '.join(map(str, reduced.traced))} of {len(reduced.source)}"
    note = Mark(kind=MarkKind.NOTE, index=0, time=0, text=text)
    return replace(whole, marks=(note, *whole.marks))


def surprise(prepared: Prepared, found: Layers, kinds: Sequence[object], reduced: Reduction) -> str | None:
    """What the model does beside its layers that a run of few does not show, in a sentence; None: nothing.

    Forwards come after the run, and once for nothing: what a model makes when it first runs is there by then, and
    what backward would have put away (FSDP's gathered parameters) is there every time.
    """

    def walked(numbers: Sequence[int]) -> Walk:
        optimizer = prepared.optimizer(prepared.model) if prepared.training.own is not None else None
        step = partial(prepared.training.step, prepared.model, optimizer)
        return walk(found, [kinds[number] for number in numbers], step)

    try:
        with only(prepared.model, found, reduced.traced):
            walked(reduced.traced)
        full = walked(range(len(kinds)))
        with only(prepared.model, found, reduced.traced):
            few = walked(reduced.traced)
    except Exception as error:  # noqa: BLE001  # whatever the user's code raises where its layers only return
        return f"the model does not run without its layers: {type(error).__name__}"
    odd = odd_layer(reduced, few, full)
    return None if odd is None else f"the model treats layer {odd} in another way than layers like it"


def _found(prepared: Prepared, path: str | None) -> Layers | None:
    """The repeated layers; None where there are none and nobody asked for them."""
    return repeated_layers(prepared.model) if path is None else find_layers(prepared.model, path)


def _record(place: Rehearsal, prepared: Prepared, steps: int) -> None:
    model, optimizer = prepared.model, prepared.optimizer(prepared.model)
    with place.recorded(model, optimizer) as count:
        count.told = True
        for _ in range(steps):
            prepared.training.step(model, optimizer)
            count.end()
