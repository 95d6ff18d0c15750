"""The parts of a decoder that parallelism treats apart: embedding, layers, final norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from evenload.errors import EvenloadError
from evenload.record.layers import find_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The modules of a decoder, or of one chunk of its pipeline, which may have neither embedding nor head."""

    layers: Sequence[nn.Module]
    """Repeated layers, in order."""
    embedding: nn.Module | None = None
    """Turns tokens into hidden states."""
    norm: nn.Module | None = None
    """Normalizes the hidden states after the last layer."""
    head: nn.Module | None = None
    """Turns hidden states into logits."""


def find_parts(model: nn.Module, layers: str | None = None) -> Parts:
    """The parts of a causal language model of transformers.

    Args:
        model: a model that says which its input and output embeddings are, as those of transformers do.
        layers: module path of the list of layers; None: the largest list.

    Raises:
        EvenloadError: there is no list of layers.
    """
    found = find_layers(model, layers)
    embedding, head = _asked(model, "get_input_embeddings"), _asked(model, "get_output_embeddings")
    around: Any = model.get_submodule(found.path.rpartition(".")[0])
    norm = getattr(around, "norm", None)
    return Parts(
        layers=tuple(found.modules),
        embedding=embedding,
        norm=norm if isinstance(norm, nn.Module) else None,
        head=head,
    )


def check_complete(model: nn.Module, parts: Parts) -> None:
    """Make sure that all parameters of a model are in its parts.

    Raises:
        EvenloadError: they are not; with the first module that is left out.
    """
    known = {id(module) for part in _all(parts) for module in part.modules()}
    for path, module in cast("Any", model).named_modules():
        if id(module) not in known and any(True for _ in module.parameters(recurse=False)):
            raise EvenloadError(
                f"{path} ({type(module).__name__}) holds parameters and is neither embedding, layer, norm nor head",
                where=f"model: {path}",
                fix="run the model without tensor parallelism",
            )


def _all(parts: Parts) -> list[nn.Module]:
    return [*parts.layers, *(part for part in (parts.embedding, parts.norm, parts.head) if part is not None)]


def _asked(model: Any, name: str) -> nn.Module | None:
    """What a method of the model that transformers defines answers."""
    method = getattr(model, name, None)
    found: object = method() if callable(method) else None
    return found if isinstance(found, nn.Module) else None
