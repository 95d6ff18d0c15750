"""Dense feed-forward blocks."""

from __future__ import annotations

from evenload.model import FeedForward
from evenload.profile.eager.linear import linear
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape

_ACTIVATIONS = {"swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_tanh": "gelu"}
"""Names in configurations -> the operator that runs. All of them keep their input."""


def activation_name(activation: str) -> str:
    """The operator behind an activation's name in a configuration."""
    return _ACTIVATIONS.get(activation, activation)


def feed_forward(tape: Tape, path: str, source: Ref, shape: FeedForward, sizes: Sizes) -> Ref:
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate.

    Keeps the input once for gate and up, both of their results, the activation and the product.
    """
    inner, width = sizes.hidden, shape.intermediate // sizes.tp
    act = activation_name(shape.activation)
    if not shape.gated:
        up = linear(tape, f"{path}.up_proj", source, inner, width, bias=shape.bias)
        hidden = tape.op(f"{path}.act_fn", act, (up,), Out(up.elements, up.width), saves=(up,))
        return linear(tape, f"{path}.down_proj", hidden, width, inner, bias=shape.bias)
    gate = linear(tape, f"{path}.gate_proj", source, inner, width, bias=shape.bias)
    active = tape.op(f"{path}.act_fn", act, (gate,), Out(gate.elements, gate.width), saves=(gate,))
    up = linear(tape, f"{path}.up_proj", source, inner, width, bias=shape.bias)
    product = tape.op(path, "mul", (active, up), Out(up.elements, up.width), saves=(active, up))
    return linear(tape, f"{path}.down_proj", product, width, inner, bias=shape.bias)
