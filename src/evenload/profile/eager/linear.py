"""Matrix products with a weight."""

from __future__ import annotations

from evenload.profile.tape import Out, Ref, Tape


def linear(tape: Tape, source: Ref, inner: int, outer: int, *, bias: bool = False, shared_bias: int = 1) -> Ref:
    """`torch.nn.Linear` with a weight of [outer, inner]: keeps its input.

    Args:
        tape: at the module.
        source: input; rows of `inner` elements.
        inner: features in, on this rank.
        outer: features out, on this rank.
        bias: the module has a bias, which the same kernel adds (`addmm`).
        shared_bias: ranks whose results are summed afterwards: each adds its share of the bias (DTensor, partial sums).
    """
    weight = tape.parameter("weight", inner * outer, source.width)
    own: tuple[Ref, ...] = (weight,)
    nbytes = weight.nbytes
    if bias:
        added = tape.parameter("bias", outer, source.width)
        nbytes += added.nbytes
        if shared_bias > 1:
            added = tape.op("linear", (added,), added.like(), aten="div")
        own = (added, weight)
    rows = source.elements // inner
    return tape.op(
        "linear",
        (source, *own),
        Out(rows * outer, source.width),
        aten="addmm" if bias else "mm",
        saves=(source, weight),
        flops=2.0 * rows * inner * outer,
        heavy=True,
        weight_bytes=nbytes,
    )
