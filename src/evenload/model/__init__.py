"""What is trained: an ordered list of layers with sizes."""

from evenload.model.huggingface import model_from_config, read_config
from evenload.model.mindformers import model_from_mindformers
from evenload.model.presets import model_source, open_model, preset, preset_names
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
    "model_from_mindformers",
    "model_source",
    "open_model",
    "preset",
    "preset_names",
    "read_config",
]
