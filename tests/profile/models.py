"""The traced models as values of evenload."""

from __future__ import annotations

from typing import Any

import cases

from evenload.model import Layer, Model
from evenload.model.huggingface import model_from_config
from evenload.setup import Setup


def setup_of(case: dict[str, Any], **changes: Any) -> Setup:
    """The setup under which a case was traced."""
    same = ("dtype", "attention", "seq", "tp", "sequence_parallel")
    options = {"micro_batch": case["batch"], **{name: case[name] for name in same}}
    return Setup(**{**options, **changes})


def model_of(case: dict[str, Any]) -> Model:
    """The model that a case traced, read from its configuration."""
    return model_from_config({**cases.BASE, **case["config"], "model_type": case["family"]}, name=case["name"])


def layer_of(model: Model, name: str) -> Layer:
    """The layer that a golden file calls `embedding`, `head`, `0`, `1` ..."""
    if name == "embedding":
        return model.embedding
    return model.head if name == "head" else model.blocks[int(name)]
