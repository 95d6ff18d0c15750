"""Collectives of tensor parallelism, as DTensor runs them for column- and row-wise linear layers.

Source of the plan: PyTorch, `torch.distributed.tensor.parallel` (ColwiseParallel, RowwiseParallel, SequenceParallel,
PrepareModuleInput), as torchtitan uses them for Llama.
"""

from __future__ import annotations

from evenload.profile.hardware import sent_bytes
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape


def gathered(tape: Tape, source: Ref, sizes: Sizes) -> Ref:
    """All tokens of a tensor that sequence parallelism divides; the tensor itself where it is whole.

    The gather concatenates along the first dimension. The sequence is the second, so the pieces are concatenated again
    unless there is one sequence: that copy, not the gathered tensor, is what linear layers keep.
    """
    if not sizes.sequence_parallel:
        return source
    full = Out(source.elements * sizes.tp, source.width)
    whole = tape.op(
        "all_gather_into_tensor",
        (source,),
        full,
        comm="all_gather",
        comm_bytes=sent_bytes("all_gather", full.elements * full.width, sizes.tp),
    )
    return tape.op("cat", (whole,), full) if sizes.batch > 1 else whole


def reduced(tape: Tape, source: Ref, sizes: Sizes) -> Ref:
    """The sum over tensor-parallel ranks of partial results: whole, or divided along the sequence."""
    if sizes.tp == 1:
        return source
    if not sizes.sequence_parallel:
        sent = sent_bytes("all_reduce", source.nbytes, sizes.tp)
        return tape.op("all_reduce", (source,), source.like(), comm="all_reduce", comm_bytes=sent)
    pieces = tape.op("cat", (source,), source.like())
    return tape.op(
        "reduce_scatter_tensor",
        (pieces,),
        Out(source.elements // sizes.tp, source.width),
        comm="reduce_scatter",
        comm_bytes=sent_bytes("reduce_scatter", source.nbytes, sizes.tp),
    )
