"""The embedding on the first stage."""

from __future__ import annotations

from evenload.profile.eager.collectives import reduced
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape

INDEX = 8
"""Bytes of a token number or any other index (int64)."""
BOOL = 1


def embedding(tape: Tape, tokens: Ref, sizes: Sizes) -> Ref:
    """Rows of the table for every token: keeps the token numbers, which the data loader holds anyway.

    Under tensor parallelism a rank has some of the rows: it looks the others up as row 0, strikes them out, and the sum
    over ranks is the result.
    """
    module = tape.at("embed_tokens")
    table = module.parameter("weight", sizes.vocabulary * sizes.hidden, sizes.width)
    own = masked_numbers(module, tokens, "embedding") if sizes.tp > 1 else tokens
    out = Out(tokens.elements * sizes.hidden, sizes.width)
    rows = module.op("embedding", (table.part(out.elements), own), out, saves=(tokens,), weight_bytes=table.nbytes)
    rows = reduced(module, rows, sizes)
    return module.op("mul", (rows,), rows.like()) if sizes.style.scaled_embedding else rows


def masked_numbers(tape: Tape, numbers: Ref, name: str) -> Ref:
    """Numbers counted from this rank's first row; those of other ranks become 0.

    Source: PyTorch, `torch.distributed.tensor._ops._mask_buffer` and `_embedding_ops`.
    """
    flags = Out(numbers.elements, BOOL, differentiable=False)
    below = tape.op(name, (numbers,), flags, aten="lt")
    above = tape.op(name, (numbers,), flags, aten="ge")
    tape.op(name, (below, above), flags, aten="__or__")
    copied = tape.op(name, (numbers,), Out(numbers.elements, INDEX, differentiable=False), aten="clone")
    return tape.op(name, (copied,), Out(numbers.elements, INDEX, differentiable=False), aten="sub")
