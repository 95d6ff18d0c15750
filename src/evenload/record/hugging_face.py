"""Models of transformers from a configuration alone."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from typing import Any, Final, Literal

import torch
from torch import nn

from evenload.errors import EvenloadError, did_you_mean

Attention = Literal["sdpa", "eager"]
_MISSING: Final = "the configuration is read by transformers, which is not installed"


def model_builder(
    config: Mapping[str, Any],
    *,
    where: str = "config.json",
    dtype: torch.dtype = torch.bfloat16,
    attention: Attention = "sdpa",
) -> Callable[[], nn.Module]:
    """A function that builds the causal language model of a configuration, on whatever device is the default.

    Nothing is downloaded, and nothing of the repository's own code runs.

    Args:
        config: what a `config.json` says; never changed.
        where: what to call it in errors.
        dtype: type of the parameters.
        attention: `sdpa` (fused) or `eager`.

    Raises:
        EvenloadError: transformers is not installed, does not know the model, or cannot read the configuration.
    """
    try:
        auto: Any = import_module("transformers.models.auto")
    except ImportError:
        raise EvenloadError(_MISSING, where=where, fix="pip install transformers") from None
    known: Mapping[str, Any] = auto.CONFIG_MAPPING
    kind = config.get("model_type")
    if kind not in known:
        raise EvenloadError(
            f"transformers {import_module('transformers').__version__} has no model of the type {kind!r}",
            where=f"{where}: $.model_type",
            fix=did_you_mean(str(kind), list(known))
            or "install a newer transformers, or pass a function that builds it",
        )

    with _quiet(), _failing(where):
        read = known[str(kind)].from_dict(dict(config)).get_text_config(decoder=True)
        read.use_cache = False
        if attention != "sdpa":  # what transformers chooses by itself, where the model has it
            read._attn_implementation = attention  # noqa: SLF001  # the way that transformers offers
        if type(read) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise EvenloadError(
                f"transformers has no causal language model of the type {kind!r}",
                where=where,
                fix="pass a function that builds it, package.module:function",
            )
        model: Any = auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(read)]

    def build() -> nn.Module:
        with _quiet(), _failing(where):
            return model._from_config(deepcopy(read), dtype=dtype).train()  # noqa: SLF001  # what AutoModel calls

    return build


def token_batches(
    model: nn.Module, *, micro_batch: int, seq: int, device: str
) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that makes token numbers, which are their own labels.

    Raises:
        EvenloadError: the model does not say that it reads tokens.
    """
    config = getattr(model, "config", None)
    vocabulary: object = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise EvenloadError("the model does not say how many tokens there are", fix="say what it is called with")

    def batch() -> dict[str, torch.Tensor]:
        tokens = torch.randint(vocabulary, (micro_batch, seq), device=device)
        return {"input_ids": tokens, "labels": tokens}

    return batch


@contextmanager
def _quiet() -> Generator[None]:
    """Without the remarks of transformers about models that nobody will load."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _failing(where: str) -> Generator[None]:
    try:
        yield
    except EvenloadError:
        raise
    except Exception as error:  # transformers checks configurations in as many ways as it has models
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise EvenloadError(
            f"transformers cannot build the model: {text[0]}", where=where, fix="check the sizes in the configuration"
        ) from error
