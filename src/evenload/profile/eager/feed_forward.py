"""Dense feed-forward blocks."""

from __future__ import annotations

from evenload.model import FeedForward
from evenload.profile.eager.linear import linear
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Ref, Tape

_ACTIVATIONS = {"swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_tanh": "gelu"}
"""Names in configurations -> the operator that runs. All of them keep their input."""


def activation_name(activation: str) -> str:
    """The operator behind an activation's name in a configuration."""
    return _ACTIVATIONS.get(activation, activation)


def feed_forward(tape: Tape, source: Ref, shape: FeedForward, sizes: Sizes) -> Ref:
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate.

    Keeps the input once for gate and up, both of their results, the activation and the product. Under tensor
    parallelism the result is this rank's part of a sum.

    Args:
        tape: at the module.
        source: all tokens of the rank.
        shape: widths of the whole model.
        sizes: the rank's micro-batch.
    """
    inner, width = sizes.hidden, shape.intermediate // sizes.tp
    act = activation_name(shape.activation)
    down = tape.at("down_proj")
    if not shape.gated:
        up = linear(tape.at("up_proj"), source, inner, width, bias=shape.bias)
        hidden = tape.at("act_fn").op(act, (up,), up.like(), saves=(up,))
        return linear(down, hidden, width, inner, bias=shape.bias, shared_bias=sizes.tp)
    if sizes.style.fused_projections:
        both = linear(tape.at("gate_up_proj"), source, inner, 2 * width, bias=shape.bias)
        half = both.part(both.elements // 2)
        active = tape.at("activation_fn").op(act, (half,), half.like(), saves=(both,))
        product = tape.op("mul", (half, active), half.like(), saves=(both, active))
    else:
        gate = linear(tape.at("gate_proj"), source, inner, width, bias=shape.bias)
        active = tape.at("act_fn").op(act, (gate,), gate.like(), saves=(gate,))
        up = linear(tape.at("up_proj"), source, inner, width, bias=shape.bias)
        product = tape.op("mul", (active, up), up.like(), saves=(active, up))
    return linear(down, product, width, inner, bias=shape.bias, shared_bias=sizes.tp)
