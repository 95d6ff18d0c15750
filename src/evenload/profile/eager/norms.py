"""Normalisation modules, written out as eager PyTorch runs them."""

from __future__ import annotations

from evenload.profile.tape import Out, Ref, Tape

FP32 = 4


def rms_norm(tape: Tape, source: Ref, features: int, *, one_plus_weight: bool = False) -> Ref:
    """`x * rsqrt(mean(x^2) + eps) * weight` in fp32.

    Keeps the fp32 copy of `x`, the fp32 inverse root of each row and the input of the product with the weight
    (transformers: `LlamaRMSNorm` and its copies).

    Args:
        tape: at the module.
        source: input; rows of `features` elements.
        features: width of a row.
        one_plus_weight: Gemma: multiply by `1 + weight` in fp32, then convert back; the others convert first.
    """
    rows, full = Out(source.elements // features, FP32), source.like(width=FP32)
    low = source.width != FP32
    cast = "float" if one_plus_weight else "to"
    wide = tape.op(cast, (source,), full, aten="_to_copy") if low else source
    square = tape.op("pow", (wide,), full, saves=(wide,))
    mean = tape.op("mean", (square,), rows)
    shifted = tape.op("add", (mean,), rows)
    root = tape.op("rsqrt", (shifted,), rows, saves_results=(0,))
    normed = tape.op("mul", (wide, root), full, saves=(wide, root))
    weight = tape.parameter("weight", features, tape.parameter_width(source))
    if one_plus_weight:
        return _times_one_plus(tape, normed, weight)
    if low:
        normed = tape.op("to", (normed,), source.like(), aten="_to_copy")
    wider = normed.like(width=max(weight.width, normed.width))
    return tape.op("mul", (weight, normed), wider, saves=(weight, normed), weight_bytes=weight.nbytes)


def _times_one_plus(tape: Tape, normed: Ref, weight: Ref) -> Ref:
    low, own, width = weight.width != FP32, weight.nbytes, weight.width
    if low:
        weight = tape.op("float", (weight,), weight.like(width=FP32), aten="_to_copy", weight_bytes=own)
        own = 0
    factor = tape.op("add", (weight,), weight.like(), weight_bytes=own)
    scaled = tape.op("mul", (normed, factor), normed.like(), saves=(normed, factor))
    return tape.op("type_as", (scaled,), scaled.like(width=width), aten="_to_copy") if low else scaled


def layer_norm(tape: Tape, source: Ref, features: int) -> Ref:
    """`torch.nn.LayerNorm`: one kernel that keeps its input and the fp32 mean and inverse deviation of each row."""
    rows = source.elements // features
    weight = tape.parameter("weight", features, source.width)
    bias = tape.parameter("bias", features, source.width)
    out, *_ = tape.ops(
        "layer_norm",
        (source, weight, bias),
        (
            source.like(),
            Out(rows, FP32, "mean", differentiable=False),
            Out(rows, FP32, "rstd", differentiable=False),
        ),
        aten="native_layer_norm",
        saves=(source, weight),
        saves_results=(1, 2),
        weight_bytes=weight.nbytes + bias.nbytes,
    )
    return out
