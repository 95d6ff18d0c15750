"""Placeholder gradients of Transformer Engine.

Its linear layers add the gradient of a weight straight into the accumulated one, but must hand autograd something: a
tensor of the weight's shape and type, never filled, made at the first backward and kept for all weights of that shape.
Source: Transformer Engine, `pytorch/module/base.py` (`get_dummy_wgrad`).
"""

from __future__ import annotations

from collections.abc import Iterable

from evenload.model import Experts, Layer
from evenload.plan.operators import Graph
from evenload.setup import Setup

_OWN = ("lm_head", "embed_tokens", "gate")
"""Modules of Megatron-LM itself: what they hand autograd is not kept."""


def placeholder_bytes(layers: Iterable[tuple[Layer, Graph]], setup: Setup) -> int:
    """Bytes of the placeholders of a rank that holds these layers: one for each shape of a weight.

    Weights of one module and size are taken to have one shape; every expert has a weight of its own.
    """
    shapes: dict[tuple[str, int], int] = {}
    for layer, graph in layers:
        for operator in graph.operators:
            module = operator.path.rpartition(".")[2]
            if not operator.heavy or not operator.weight_bytes or module in _OWN:
                continue
            count = 1
            if operator.name == "grouped_mm" and isinstance(layer.feed_forward, Experts):
                count = layer.feed_forward.experts // setup.ep
            nbytes = operator.weight_bytes // count
            shapes[module, nbytes] = nbytes
    return sum(shapes.values())
