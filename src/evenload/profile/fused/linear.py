"""Linear layers of tensor parallelism with their collectives.

Sources: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198,
section 4.2.2; Transformer Engine, `pytorch/module/{linear,layernorm_linear}.py`; Megatron-LM,
`core/tensor_parallel/layers.py`.
"""

from __future__ import annotations

from evenload.profile.hardware import sent_bytes
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape


def plain(tape: Tape, source: Ref, inner: int, outer: int, *, bias: bool = False, scratch: int = 0) -> Ref:
    """A product with a weight of [outer, inner] that keeps its input.

    Args:
        tape: at the module.
        source: rows of `inner` elements.
        inner: features in, on this rank.
        outer: features out, on this rank.
        bias: has a bias.
        scratch: bytes that backward takes on top.
    """
    return _product(tape, source, source, (inner, outer), bias=bias, scratch=scratch)


def column(
    tape: Tape, source: Ref, inner: int, outer: int, sizes: Sizes, *, bias: bool = False, scratch: int = 0
) -> Ref:
    """Divided along its results. Under sequence parallelism the input is gathered, kept divided, and gathered again."""
    if not sizes.sequence_parallel:
        return plain(tape, source, inner, outer, bias=bias, scratch=scratch)
    whole = gather(tape, source, sizes)
    return _product(tape, whole, source, (inner, outer), bias=bias, scratch=scratch + whole.nbytes)


def row(tape: Tape, source: Ref, inner: int, outer: int, sizes: Sizes, *, bias: bool = False) -> Ref:
    """Divided along its input: the parts of the result are summed over ranks."""
    return reduce(tape, plain(tape, source, inner, outer, bias=bias), sizes)


def gather(tape: Tape, source: Ref, sizes: Sizes) -> Ref:
    """All tokens of a tensor that sequence parallelism divides. Sequence comes first here: nothing is copied after."""
    if not sizes.sequence_parallel:
        return source
    full = Out(source.elements * sizes.tp, source.width)
    sent = sent_bytes("all_gather", full.elements * full.width, sizes.tp)
    return tape.op("all_gather", (source,), full, comm="all_gather", comm_bytes=sent)


def reduce(tape: Tape, source: Ref, sizes: Sizes) -> Ref:
    """The sum over tensor-parallel ranks, divided along the sequence under sequence parallelism."""
    if sizes.tp == 1:
        return source
    if not sizes.sequence_parallel:
        sent = sent_bytes("all_reduce", source.nbytes, sizes.tp)
        return tape.op("all_reduce", (source,), source.like(), comm="all_reduce", comm_bytes=sent)
    sent = sent_bytes("reduce_scatter", source.nbytes, sizes.tp)
    out = Out(source.elements // sizes.tp, source.width)
    return tape.op("reduce_scatter", (source,), out, comm="reduce_scatter", comm_bytes=sent)


def _product(tape: Tape, read: Ref, kept: Ref, shape: tuple[int, int], *, bias: bool, scratch: int) -> Ref:
    inner, outer = shape
    weight = tape.parameter("weight", inner * outer, read.width)
    own = (weight, tape.parameter("bias", outer, read.width)) if bias else (weight,)
    rows = read.elements // inner
    return tape.op(
        "linear",
        (read, *own),
        Out(rows * outer, read.width),
        aten="mm",
        saves=(kept, weight),
        flops=2.0 * rows * inner * outer,
        heavy=True,
        backward_scratch=scratch,
        weight_bytes=sum(ref.nbytes for ref in own),
    )
