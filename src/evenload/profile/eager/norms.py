"""Normalisation modules, written out as eager PyTorch runs them."""

from __future__ import annotations

from evenload.profile.tape import Out, Ref, Tape

FP32 = 4


def rms_norm(tape: Tape, path: str, source: Ref, features: int, *, one_plus_weight: bool = False) -> Ref:
    """`x * rsqrt(mean(x^2) + eps) * weight` in fp32.

    Keeps the fp32 copy of `x`, the fp32 inverse root of each row and the input of the product with the weight
    (transformers: `LlamaRMSNorm` and its copies).

    Args:
        tape: where to write.
        path: module path.
        source: input; rows of `features` elements.
        features: width of a row.
        one_plus_weight: Gemma: multiply by `1 + weight` in fp32, then convert back; the others convert first.
    """
    rows = Out(source.elements // features, FP32)
    full = Out(source.elements, FP32)
    low = source.width != FP32
    cast = "float" if one_plus_weight else "to"
    wide = tape.op(path, cast, (source,), full, aten="_to_copy") if low else source
    square = tape.op(path, "pow", (wide,), full, saves=(wide,))
    mean = tape.op(path, "mean", (square,), rows)
    shifted = tape.op(path, "add", (mean,), rows)
    root = tape.op(path, "rsqrt", (shifted,), rows, saves_results=(0,))
    normed = tape.op(path, "mul", (wide, root), full, saves=(wide, root))
    weight = tape.held(f"{path}.weight", features, source.width)
    if one_plus_weight:
        return _times_one_plus(tape, path, normed, weight, source.width)
    if low:
        normed = tape.op(path, "to", (normed,), Out(source.elements, source.width), aten="_to_copy")
    return tape.op(
        path,
        "mul",
        (weight, normed),
        Out(source.elements, source.width),
        saves=(weight, normed),
        weight_bytes=weight.nbytes,
    )


def _times_one_plus(tape: Tape, path: str, normed: Ref, weight: Ref, width: int) -> Ref:
    low, own = width != FP32, weight.nbytes
    if low:
        weight = tape.op(path, "float", (weight,), Out(weight.elements, FP32), aten="_to_copy", weight_bytes=own)
        own = 0
    factor = tape.op(path, "add", (weight,), Out(weight.elements, FP32), weight_bytes=own)
    scaled = tape.op(path, "mul", (normed, factor), Out(normed.elements, FP32), saves=(normed, factor))
    return tape.op(path, "type_as", (scaled,), Out(normed.elements, width), aten="_to_copy") if low else scaled


def layer_norm(tape: Tape, path: str, source: Ref, features: int) -> Ref:
    """`torch.nn.LayerNorm`: one kernel that keeps its input and the fp32 mean and inverse deviation of each row."""
    rows = source.elements // features
    weight = tape.held(f"{path}.weight", features, source.width)
    bias = tape.held(f"{path}.bias", features, source.width)
    out, *_ = tape.ops(
        path,
        "layer_norm",
        (source, weight, bias),
        (
            Out(source.elements, source.width),
            Out(rows, FP32, "mean", differentiable=False),
            Out(rows, FP32, "rstd", differentiable=False),
        ),
        aten="native_layer_norm",
        saves=(source, weight),
        saves_results=(1, 2),
        weight_bytes=weight.nbytes + bias.nbytes,
    )
    return out
