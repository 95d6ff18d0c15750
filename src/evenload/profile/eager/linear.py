"""Matrix products with a weight."""

from __future__ import annotations

from evenload.profile.tape import Out, Ref, Tape


def linear(tape: Tape, path: str, source: Ref, inner: int, outer: int, *, bias: bool = False) -> Ref:
    """`torch.nn.Linear` with a weight of [outer, inner]: keeps its input.

    Args:
        tape: where to write.
        path: module path.
        source: input; rows of `inner` elements.
        inner: features in, on this rank.
        outer: features out, on this rank.
        bias: the module has a bias, which the same kernel adds (`addmm`).
    """
    weight = tape.held(f"{path}.weight", inner * outer, source.width)
    own: tuple[Ref, ...] = (tape.held(f"{path}.bias", outer, source.width), weight) if bias else (weight,)
    rows = source.elements // inner
    return tape.op(
        path,
        "linear",
        (source, *own),
        Out(rows * outer, source.width),
        aten="addmm" if bias else "mm",
        saves=(source, weight),
        flops=2.0 * rows * inner * outer,
        heavy=True,
        weight_bytes=sum(ref.nbytes for ref in own),
    )
