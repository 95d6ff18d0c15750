"""Matrix products with a weight."""

from __future__ import annotations

from evenload.profile.tape import Out, Ref, Tape


def linear(
    tape: Tape,
    source: Ref,
    inner: int,
    outer: int,
    *,
    bias: bool = False,
    shared_bias: int = 1,
    width: int | None = None,
    keeps_result: bool = False,
) -> Ref:
    """`torch.nn.Linear` with a weight of [outer, inner]: keeps its input.

    Under autocast weight, bias and input are converted first, and what is converted is kept: of the weight a copy for
    every micro-batch in flight (PyTorch: `cached_cast` in `aten/src/ATen/autocast_mode.cpp`).

    Args:
        tape: at the module.
        source: input; rows of `inner` elements.
        inner: features in, on this rank.
        outer: features out, on this rank.
        bias: the module has a bias, which the same kernel adds (`addmm`).
        width: bytes of an element of the weight, where it is not that of other parameters.
        keeps_result: somebody holds the result until the backward of the product has run.
        shared_bias: ranks whose results are summed afterwards: each adds its share of the bias (DTensor, partial sums).
    """
    width = width or tape.parameter_width(source)
    master = tape.parameter("weight", inner * outer, width)
    weight = tape.lowered(master, master.nbytes)
    own: tuple[Ref, ...] = (weight,)
    nbytes = weight.nbytes
    if bias:
        master = tape.parameter("bias", outer, width)
        added = tape.lowered(master, master.nbytes)
        nbytes += added.nbytes
        if shared_bias > 1:
            added = tape.op("linear", (added,), added.like(), aten="div")
        own = (added, weight)
    source = tape.lowered(source)
    rows = source.elements // inner
    return tape.op(
        "linear",
        (source, *own),
        Out(rows * outer, source.width),
        aten="addmm" if bias else "mm",
        saves=(source, weight),
        saves_results=(0,) if keeps_result else (),
        flops=2.0 * rows * inner * outer,
        heavy=True,
        weight_bytes=nbytes if weight.width == width else 0,  # else the conversion makes the gradient
    )
