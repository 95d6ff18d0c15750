"""Fused normalisation."""

from __future__ import annotations

from evenload.profile.tape import Out, Ref, Tape

FP32 = 4


def norm(tape: Tape, source: Ref, features: int, *, kind: str = "rms_norm") -> Ref:
    """RMSNorm or LayerNorm as one kernel: keeps its input and an fp32 number a row, LayerNorm two.

    Source: Transformer Engine, `pytorch/module/layernorm_linear.py`: saved are `inputmat`, `ln_weight`, `mu`, `rsigma`.
    """
    weight = tape.parameter("weight", features, source.width)
    own, nbytes = (weight,), weight.nbytes
    rows = source.elements // features
    statistics = [Out(rows, FP32, "rsigma", differentiable=False)]
    if kind == "layer_norm":
        own = (weight, tape.parameter("bias", features, source.width))
        nbytes *= 2
        statistics.append(Out(rows, FP32, "mu", differentiable=False))
    out, *_ = tape.ops(
        kind,
        (source, *own),
        (source.like(), *statistics),
        saves=(source, weight),
        saves_results=tuple(range(1, 1 + len(statistics))),
        weight_bytes=nbytes,
    )
    return out
