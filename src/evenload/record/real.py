"""The run of few layers for real: for code that needs the data of its tensors, which no dry run has.

The layers that run are chosen as in a dry run, and what they do is composed to the run of all of them. Parameters of
the other layers take no memory at any time: while the model is built, they go to `meta` as soon as they are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_map_only

from evenload.errors import EvenloadError, Notice
from evenload.ledger.ledger import Ledger, Mark
from evenload.ledger.words import MarkKind
from evenload.record.dedup import expand
from evenload.record.failures import explained
from evenload.record.layers import find_layers, only, recompute_layers
from evenload.record.recorder import record
from evenload.record.rehearsal import Place
from evenload.record.runs import Prepared, surprise
from evenload.record.targets import Target
from evenload.record.training import Training
from evenload.simulate.composition import UNITS, Reduction, reduction

_ALL: Final = "run all of them: --real without a number in --layers"
_DEVIATION = 0.02
"""Of the weights that stand for trained ones."""


class Here:
    """This host, in the place of a rehearsal."""

    fake = None
    """Tensors are real."""

    def module(self) -> None:
        """Nobody follows which module runs; the error's own line says it."""


def real_steps(
    prepare: Callable[[Place], Prepared],
    target: Target,
    *,
    steps: int,
    count: int | None = None,
    path: str | None = None,
) -> Ledger:
    """Record training steps that really run, of all layers or of few that are composed to all.

    Args:
        prepare: builds what runs.
        target: the device that it runs on; it must be there.
        steps: how many steps.
        count: layers to run; None: all.
        path: module path of the list of repeated layers; None: the largest.

    Raises:
        EvenloadError: the device is not there, so few layers do not stand for all, or the code that runs fails.
    """
    _require(target)
    here = Here()
    with explained(here):
        if count is None:
            prepared = prepare(here)
            if prepared.recompute or path is not None:
                recompute_layers(find_layers(prepared.model, path), prepared.recompute)
            return _recorded(prepared, target, steps)
        with _weights_on_meta():
            prepared = prepare(here)
        found = find_layers(prepared.model, path)
        kinds = [(kind, number in prepared.recompute) for number, kind in enumerate(found.kinds)]
        reduced = _of_at_most(kinds, count)
        recompute_layers(found, prepared.recompute)
        with only(prepared.model, found, reduced.traced):
            _materialize(prepared.model)
            ledger = _recorded(prepared, target, steps)
        moved = replace(prepared, training=_there(prepared.training, target))
        if (why := surprise(moved, found, kinds, reduced)) is not None:
            raise EvenloadError(f"few layers do not stand for all: {why}", where="--layers", fix=_ALL)
    whole, same = _composed(ledger, found.path, reduced)
    text = f"ran layers {', '.join(map(str, reduced.traced))} of {len(reduced.source)} for real"
    notices = () if same else (Notice(fact="layers of one kind did not need the same memory; one stands for all"),)
    note = Mark(kind=MarkKind.NOTE, index=0, time=0, text=text)
    return replace(whole, marks=(note, *whole.marks), notices=(*whole.notices, *notices))


def _composed(ledger: Ledger, path: str, reduced: Reduction) -> tuple[Ledger, bool]:
    """The ledger of all layers, and whether those that stand for others did the same to the byte."""
    try:
        return expand(ledger, path, reduced), True
    except EvenloadError:
        pass
    try:
        return expand(ledger, path, reduced, sizes=False), False
    except EvenloadError as error:
        raise EvenloadError(error.fact, where="--layers", fix=_ALL) from None


def _of_at_most(kinds: list[tuple[int, bool]], count: int) -> Reduction:
    """The most layers up to a number that stand for all."""
    least = reduction(kinds)
    if count < len(least.traced):
        raise EvenloadError(
            f"{count} layers cannot stand for {len(kinds)}",
            where="--layers",
            fix=f"run at least {len(least.traced)}: of every kind the first two and the last two in a row",
        )
    for units in range(UNITS + 1, count + 1):
        more = reduction(kinds, units=units)
        if len(more.traced) > count:
            break
        least = more
    return least


def _require(target: Target) -> None:
    module: Any = torch.cpu if target.kind == "cpu" else getattr(torch, target.kind, None)
    if module is None or not module.is_available():
        raise EvenloadError(f"there is no {target.kind} device here", where="--device", fix="use --device cpu")


def default_device() -> str:
    """The device that code runs on here where nobody says."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _recorded(prepared: Prepared, target: Target, steps: int) -> Ledger:
    model = prepared.model.to(target.name)
    training = _there(prepared.training, target)
    optimizer = prepared.optimizer(model)
    with record(model=model, optimizer=optimizer) as recording:
        count = recording.core.steps
        count.told = True
        for _ in range(steps):
            training.step(model, optimizer)
            count.end()
    return recording.ledger


def _there(training: Training, target: Target) -> Training:
    """The same with batches on the device."""
    return replace(training, batch=lambda: tree_map_only(torch.Tensor, _to(target), training.batch()))


def _to(target: Target) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(target.name)


@contextmanager
def _weights_on_meta() -> Generator[None]:
    """Let every parameter go to `meta` when a module gets it; buffers stay, because their content may matter."""

    def moved(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(cast("Any", moved))
    try:
        yield
    finally:
        handle.remove()


def _materialize(model: nn.Module) -> None:
    """Give the parameters that are still there memory and plausible values; shared ones stay shared."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if id(parameter) not in known:
                    known[id(parameter)] = _weight(parameter)
                setattr(module, name, known[id(parameter)])


def _weight(parameter: nn.Parameter) -> nn.Parameter:
    made = torch.empty_like(parameter, device="cpu")
    if made.is_floating_point():
        made.normal_(0.0, _DEVIATION) if made.dim() > 1 else made.fill_(1.0)
    else:
        made.zero_()
    return nn.Parameter(made, requires_grad=parameter.requires_grad)
