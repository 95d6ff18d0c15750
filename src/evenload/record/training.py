"""One training step: the built-in one, or a function of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import torch
from torch import nn

from evenload.errors import EvenloadError, did_you_mean, shown
from evenload.record.tensors import flat

OptimizerName = Literal["adamw", "adamw-fused", "adamw-loop", "sgd", "none"]
OPTIMIZERS: Final = ("adamw", "adamw-fused", "adamw-loop", "sgd", "none")
"""Optimizers that go by a name."""
_ADAMW: Final[Mapping[str, dict[str, Any]]] = {
    "adamw": {},
    "adamw-fused": {"fused": True},
    "adamw-loop": {"foreach": False},
}
_CALLED_OPTIMIZER: Final = frozenset({"optimizer", "optim", "opt", "optimiser"})
Step = Callable[..., object]
Batches = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a model is trained: what `step` does with a model and an optimizer."""

    batch: Batches
    """Makes the input of one forward: a tensor, a tuple of them, or a mapping of keywords."""
    loss: Callable[[Any], torch.Tensor] | None = None
    """From what the model returns to its loss; None: its own `loss`, or the sum of all it returns."""
    micro_batches: int = 1
    """Forwards and backwards before the optimizer steps."""
    autocast: torch.dtype | None = None
    """Forward runs under `torch.autocast` of the device in this type."""
    device: str = "cpu"
    """Kind of device that autocast is for."""
    own: Step | None = field(default=None)
    """The user's step in place of all that."""

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Run one step: forward and backward of every micro-batch, then the optimizer."""
        if self.own is not None:
            _call(self.own, model, optimizer, self.batch)
            return
        for _ in range(self.micro_batches):
            loss: Any = self._forward(model)
            loss.backward()
            del loss
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.zero_grad()

    def _forward(self, model: nn.Module) -> torch.Tensor:
        batch = self.batch()
        with nullcontext() if self.autocast is None else torch.autocast(self.device, self.autocast):
            loss = (self.loss or own_loss)(feed(model, batch))
        if not loss.requires_grad:
            raise EvenloadError("the loss does not depend on a parameter that is trained", fix="check requires_grad")
        return loss


def feed(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: keywords for a mapping, arguments for a tuple or list."""
    if isinstance(batch, Mapping):
        return model(**cast("Mapping[str, Any]", batch))
    if isinstance(batch, (tuple, list)):
        return model(*cast("tuple[Any, ...]", batch))
    return model(batch)


def own_loss(returned: Any) -> torch.Tensor:
    """The loss that a model returns, or the sum of what it returns.

    Raises:
        EvenloadError: it returns nothing that a gradient could flow from.
    """
    named = cast("Mapping[str, Any]", returned) if isinstance(returned, Mapping) else dict[str, Any]()
    loss: object = named.get("loss", getattr(cast("object", returned), "loss", None))
    if isinstance(loss, torch.Tensor):
        return loss
    found = [tensor for tensor in flat(cast("object", returned)) if tensor.is_floating_point() and tensor.requires_grad]
    if not found:
        raise EvenloadError(
            f"the model returns {_what(returned)}: there is no loss in it", fix="pass loss=, or a step function"
        )
    total = found[0].sum() if found[0].dim() else found[0]
    for tensor in found[1:]:
        total = total + tensor.sum()
    return total


def _what(returned: Any) -> str:
    return "no tensor" if not flat(returned) else "no tensor that requires a gradient"


def make_optimizer(
    choice: OptimizerName | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], model: nn.Module
) -> torch.optim.Optimizer | None:
    """The optimizer that a name or a function of parameters stands for.

    Raises:
        EvenloadError: no such name, or the function makes something else.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if choice == "none" or not trained:
        return None
    if callable(choice):
        made = cast("object", choice(trained))
        if not isinstance(made, torch.optim.Optimizer):
            raise EvenloadError(
                f"optimizer makes a {type(made).__name__}, not a torch.optim.Optimizer",
                where="$.optimizer",
                fix="return the optimizer that it makes of the parameters",
            )
        return made
    if choice == "sgd":
        return torch.optim.SGD(trained, lr=1e-3)
    if choice in _ADAMW:
        return torch.optim.AdamW(trained, lr=1e-3, **_ADAMW[choice])
    raise EvenloadError(
        f"optimizer is {shown(choice)}",
        where="$.optimizer",
        fix=did_you_mean(str(choice), list(OPTIMIZERS)) or f"use one of {', '.join(OPTIMIZERS)}, or a function",
    )


def wants_optimizer(step: Step) -> bool:
    """Whether a step function has a parameter for the optimizer."""
    return any(name in _CALLED_OPTIMIZER for name in _parameters(step))


def wants_batch(step: Step) -> bool:
    """Whether a step function has a parameter for the batch."""
    return any(name not in _CALLED_OPTIMIZER for name in _parameters(step)[1:])


def takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter that must be given."""
    return len(_parameters(function)) > 0


def _call(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Batches) -> None:
    """Call a step function: the model comes first, `optimizer` by its name, anything else is the batch."""
    names = _parameters(step)
    step(*(model if i == 0 else optimizer if name in _CALLED_OPTIMIZER else batch() for i, name in enumerate(names)))


def _parameters(step: Step) -> list[str]:
    """Names of the positional parameters without a default."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # a function of C
        return ["model"]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds and p.default is p.empty]
