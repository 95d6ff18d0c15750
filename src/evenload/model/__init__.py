"""What is trained: an ordered list of layers with sizes."""

from evenload.model.huggingface import model_from_config, read_config
from evenload.model.spec import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Model,
    Split,
    Tensor,
)

__all__ = [
    "Attention",
    "Experts",
    "FeedForward",
    "LatentAttention",
    "Layer",
    "Model",
    "Split",
    "Tensor",
    "model_from_config",
    "read_config",
]
