"""The traced models as values of evenload."""

from __future__ import annotations

from typing import Any

import cases

from evenload.model import Attention, FeedForward, Layer, Model
from evenload.setup import Setup


def setup_of(case: dict[str, Any], **changes: Any) -> Setup:
    """The setup under which a case was traced."""
    options = {"dtype": case["dtype"], "attention": case["attention"], "micro_batch": case["batch"], "seq": case["seq"]}
    return Setup(**{**options, **changes})


def model_of(case: dict[str, Any]) -> Model:
    """The model that a case traced."""
    config = {**cases.BASE, **case["config"]}
    blocks = tuple(_block(case["family"], config, index) for index in range(config["num_hidden_layers"]))
    return Model(
        name=case["name"],
        family=case["family"],
        hidden=config["hidden_size"],
        vocabulary=config["vocab_size"],
        layers=(
            Layer(kind="embedding", role="embedding", tensors=()),
            *blocks,
            Layer(kind="head", role="head", tensors=(), norms=1),
        ),
    )


def _block(family: str, config: dict[str, Any], index: int) -> Layer:
    heads = config["num_attention_heads"]
    return Layer(
        kind=f"block{index}",
        role="block",
        tensors=(),
        attention=Attention(
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim", config["hidden_size"] // heads),
            qkv_bias=config.get("attention_bias", False),
            out_bias=config.get("attention_bias", False),
        ),
        feed_forward=FeedForward(intermediate=config["intermediate_size"], bias=config.get("mlp_bias", False)),
    )
