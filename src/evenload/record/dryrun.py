"""The dry run: a training step as the target would run it, without the target and without its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from evenload.errors import EvenloadError
from evenload.ledger.ledger import Ledger
from evenload.record._torch_private import FakeCopyMode
from evenload.record.constants import Constants
from evenload.record.real import real_steps
from evenload.record.rehearsal import Place, Rehearsal
from evenload.record.runs import Prepared, record_steps
from evenload.record.targets import Target, find_target
from evenload.record.training import (
    OptimizerName,
    Step,
    Training,
    make_optimizer,
    takes_one,
    wants_batch,
    wants_optimizer,
)


def dryrun(
    model_or_builder: nn.Module | Callable[[], Any],
    step: Step | None = None,
    *,
    device: str = "cuda",
    inputs: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: OptimizerName | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = "adamw",
    steps: int = 2,
    micro_batches: int = 1,
    autocast: torch.dtype | None = None,
    full: bool = False,
    layers: str | None = None,
) -> Ledger:
    """Run training steps without the device and without the memory, and record what they would allocate.

    The operators are those that run on `device`, see `evenload.record.targets`. The second step is what all later
    ones are like: the optimizer has its states then.

    Args:
        model_or_builder: a model, which stays as it is, or a function that builds one. A function may return the model
            alone, or with a step function, an optimizer or inputs beside it, in a tuple; it is called where tensors
            take no memory, so a model of any size can be built.
        step: the training step, `step(model)`; a parameter called `optimizer` gets the optimizer, another one the
            inputs. None: forward, loss, backward, optimizer.
        device: the device that the run is for: `cuda`, `npu`, `xpu` or `cpu`. It need not be there.
        inputs: what the model is called with: a tensor, a tuple, a mapping of keywords, or a function that makes one,
            from the model or from nothing. Only shapes and types matter.
        loss: from what the model returns to the loss. None: the `loss` that it returns, or the sum of what it returns.
        optimizer: `adamw`, `adamw-fused`, `adamw-loop`, `sgd`, `none`, or a function of the parameters.
        steps: how many steps to run.
        micro_batches: forwards and backwards in the built-in step.
        autocast: type in which the built-in forward runs under autocast.
        full: run every layer. Otherwise layers that do exactly what others do are not run, where there are such; the
            ledger is the same, event for event.
        layers: module path of the list of repeated layers; None: the largest, see `find_layers`.

    Raises:
        EvenloadError: an argument is wrong, the model needs the data of a tensor, or its code fails.

    Examples:
        >>> import torch, evenload
        >>> from evenload.ledger.curve import curve
        >>> ledger = evenload.dryrun(torch.nn.Linear(1024, 1024), inputs=torch.empty(64, 1024))
        >>> curve(ledger).peak
        21254144
    """
    target, prepare = _prepared(
        model_or_builder,
        step,
        device=device,
        inputs=inputs,
        loss=loss,
        optimizer=optimizer,
        steps=steps,
        micro_batches=micro_batches,
        autocast=autocast,
    )
    return record_steps(lambda: Rehearsal(target), prepare, steps=steps, full=full, layers=layers)


def real_run(
    model_or_builder: nn.Module | Callable[[], Any],
    step: Step | None = None,
    *,
    device: str = "cpu",
    inputs: Any = None,
    optimizer: OptimizerName | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = "adamw",
    steps: int = 2,
    micro_batches: int = 1,
    autocast: torch.dtype | None = None,
    count: int | None = None,
    layers: str | None = None,
) -> Ledger:
    """Run training steps in earnest, of few layers that are composed to all: for code that looks at its data.

    Args:
        model_or_builder: as in `dryrun`.
        step: as in `dryrun`.
        device: the device that it runs on; it must be there.
        inputs: as in `dryrun`.
        optimizer: as in `dryrun`.
        steps: how many steps to run.
        micro_batches: forwards and backwards in the built-in step.
        autocast: type in which the built-in forward runs under autocast.
        count: layers to run, at least two from either end of every run of equal ones; None: all.
        layers: module path of the list of repeated layers; None: the largest, see `find_layers`.

    Raises:
        EvenloadError: an argument is wrong, the device is not there, so few layers do not stand for all, or the code
            fails.
    """
    target, prepare = _prepared(
        model_or_builder,
        step,
        device=device,
        inputs=inputs,
        optimizer=optimizer,
        steps=steps,
        micro_batches=micro_batches,
        autocast=autocast,
    )
    return real_steps(prepare, target, steps=steps, count=count, path=layers)


def _prepared(
    model_or_builder: nn.Module | Callable[[], Any], step: Step | None, *, device: str, steps: int, **how: Any
) -> tuple[Target, Callable[[Place], Prepared]]:
    """The device that is meant, and a function that builds what is trained there, once the arguments are right."""
    target = find_target(device)
    _check(model_or_builder, step, steps, how["micro_batches"])
    return target, preparing(model_or_builder, step, device=target.kind, **how)


def preparing(
    model_or_builder: nn.Module | Callable[[], Any],
    step: Step | None = None,
    *,
    device: str,
    inputs: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: OptimizerName | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = "adamw",
    micro_batches: int = 1,
    autocast: torch.dtype | None = None,
    insist: bool = True,
) -> Callable[[Place], Prepared]:
    """A function that builds, in a rehearsal, what `dryrun` trains; the arguments are those of `dryrun`.

    A builder that returns inputs or a step where the arguments have others is wrong. Without `insist` its own inputs
    hold, where the others were not asked for.
    """

    def prepare(place: Place) -> Prepared:
        model, parts = _built(model_or_builder, place)
        _refuse_two("inputs", parts, inputs if insist else None, "inputs= (--input, --seq)")
        _refuse_two("step", parts, step, "step= (--step)")
        own = cast("Step | None", parts.get("step", step))
        given = cast("torch.optim.Optimizer | None", parts.get("optimizer"))

        def make(trained: nn.Module) -> torch.optim.Optimizer | None:
            if given is not None:
                return given
            return make_optimizer(optimizer, trained) if own is None or wants_optimizer(own) else None

        return Prepared(
            model=model,
            training=Training(
                batch=_batches(parts.get("inputs", inputs), model, place, needed=own is None or wants_batch(own)),
                loss=loss,
                micro_batches=micro_batches,
                autocast=autocast,
                device=device,
                own=own,
            ),
            optimizer=make,
            whole=given is not None,
        )

    return prepare


def _refuse_two(name: str, parts: Mapping[str, Any], given: object, said: str) -> None:
    """Make sure that a builder does not return what was given, too: nobody could tell which is meant."""
    if given is not None and name in parts:
        raise EvenloadError(
            f"the function returns {name} of its own beside the model, and {said} says what to take instead",
            where=f"$.{name}",
            fix="leave one of them out",
        )


def _check(model_or_builder: object, step: object, steps: object, micro_batches: object) -> None:
    if not callable(model_or_builder):
        raise EvenloadError(
            f"{type(model_or_builder).__name__} is neither a torch.nn.Module nor a function that builds one",
            where="$.model_or_builder",
            fix="pass the model, or a function that returns it",
        )
    if step is not None and not callable(step):
        raise EvenloadError(
            f"step is a {type(step).__name__}, not a function", where="$.step", fix="pass a function of the model"
        )
    for name, value in (("steps", steps), ("micro_batches", micro_batches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise EvenloadError(f"{name} is {value!r}", where=f"$.{name}", fix="give a whole number of at least 1")


def _built(model_or_builder: nn.Module | Callable[[], Any], rehearsal: Place) -> tuple[nn.Module, dict[str, Any]]:
    """The model without memory, and what its builder made beside it."""
    if isinstance(model_or_builder, nn.Module):
        return _copied(model_or_builder, rehearsal), {}
    with nullcontext() if rehearsal.fake is None else Constants():
        made = model_or_builder()
    items = cast("tuple[Any, ...]", made) if isinstance(made, tuple) else (made,)
    model: nn.Module | None = None
    parts: dict[str, Any] = {}
    for item in items:
        if isinstance(item, nn.Module) and model is None:
            model = item
        elif isinstance(item, torch.optim.Optimizer):
            parts["optimizer"] = item
        elif callable(item):
            parts["step"] = item
        else:
            parts["inputs"] = item
    if model is None:
        raise EvenloadError(
            f"the builder returns {type(cast('object', made)).__name__}, and no torch.nn.Module in it",
            fix="return the model",
        )
    return model, parts


def _copied(model: nn.Module, rehearsal: Place) -> nn.Module:
    try:
        if rehearsal.fake is None:
            return deepcopy(model)
        with FakeCopyMode(rehearsal.fake):
            return deepcopy(model)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise EvenloadError(
            f"the model cannot be copied: {error}", fix="pass a function that builds it in place of the model"
        ) from error


def _batches(inputs: Any, model: nn.Module, rehearsal: Place, *, needed: bool) -> Callable[[], Any]:
    """Makes what the model is called with."""
    if inputs is None:
        if needed:
            raise EvenloadError(
                "nothing says what the model is called with",
                where="$.inputs",
                fix="let the function return it beside the model, pass inputs= or a step function, or on the command "
                "line --input, --step, or --seq for tokens",
            )
        return lambda: None
    if callable(inputs) and not isinstance(inputs, torch.Tensor):
        return partial(inputs, model) if takes_one(inputs) else inputs
    fake = rehearsal.fake

    def stand_in(value: Any) -> Any:
        return fake.from_tensor(value) if isinstance(value, torch.Tensor) and fake is not None else value

    batch = tree_map(stand_in, inputs)
    return lambda: batch
