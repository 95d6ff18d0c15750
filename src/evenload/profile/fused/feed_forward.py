"""Dense feed-forward blocks."""

from __future__ import annotations

from evenload.model import FeedForward
from evenload.profile.eager.feed_forward import activation_name
from evenload.profile.fused.linear import column, row
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape


def feed_forward(tape: Tape, source: Ref, shape: FeedForward, sizes: Sizes) -> Ref:
    """Gate and up as one product, activation and multiplication as one kernel.

    That kernel keeps its input, the down projection keeps its result. Source: Megatron-LM,
    `core/fusions/fused_bias_swiglu.py` and its `geglu` twin.

    Args:
        tape: at the module.
        source: the normed input, divided as it is between tensor-parallel regions.
        shape: widths of the whole model.
        sizes: the rank's micro-batch.
    """
    inner, width = sizes.hidden, shape.intermediate // sizes.tp
    act = activation_name(shape.activation)
    if shape.gated:
        both = column(tape.at("gate_up_proj"), source, inner, 2 * width, sizes, bias=shape.bias)
        name = {"silu": "swiglu", "gelu": "geglu"}.get(act, f"{act}_glu")
        hidden = tape.at("act_fn").op(name, (both,), Out(both.elements // 2, both.width), saves=(both,))
    else:
        up = column(tape.at("up_proj"), source, inner, width, sizes, bias=shape.bias)
        hidden = tape.at("act_fn").op(act, (up,), up.like(), saves=(up,))
    return row(tape.at("down_proj"), hidden, width, inner, sizes, bias=shape.bias)
