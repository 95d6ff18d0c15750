"""What `transformers` builds from a configuration, on the meta device: the reference for every count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
import transformers

transformers.logging.set_verbosity_error()

_NOT_FOR_COUNTING = ("quantization_config", "auto_map")
"""Keys that make `transformers` load other code or quantize; neither changes the shapes of the trained model."""


def build(config: Mapping[str, Any]) -> torch.nn.Module:
    """The causal language model (or the whole multimodal model) of a configuration, without memory."""
    known = {key: value for key, value in config.items() if key not in _NOT_FOR_COUNTING}
    parsed = transformers.AutoConfig.for_model(**known)
    with torch.device("meta"):
        if "text_config" in config:
            return transformers.AutoModelForImageTextToText.from_config(parsed)
        return transformers.AutoModelForCausalLM.from_config(parsed)


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """The module that holds `embed_tokens`, `layers` and `norm`."""
    return next(module for module in model.modules() if hasattr(module, "embed_tokens") and hasattr(module, "layers"))


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Parameter names and shapes of a module."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def language_parameters(model: torch.nn.Module) -> int:
    """Parameters of decoder and output projection, a tied weight once, vision parts left out."""
    decoder = decoder_of(model)
    found = {id(parameter): parameter.numel() for parameter in decoder.parameters()}
    found |= {id(parameter): parameter.numel() for parameter in model.get_output_embeddings().parameters()}
    return sum(found.values())


def layer_parameters(counts: Iterable[int]) -> list[list[int]]:
    """Runs of layers with equal counts, as `[parameters, layers]`: short enough for a golden file."""
    return [[count, len(list(run))] for count, run in groupby(counts)]
