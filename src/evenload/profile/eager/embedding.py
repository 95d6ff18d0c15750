"""The embedding on the first stage."""

from __future__ import annotations

from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape

INDEX = 8
"""Bytes of a token number or any other index (int64)."""


def embedding(tape: Tape, tokens: Ref, sizes: Sizes) -> Ref:
    """Rows of the table for every token: keeps the token numbers, which the data loader holds anyway."""
    table = tape.held("embed_tokens.weight", sizes.vocabulary * sizes.hidden, sizes.width)
    out = Out(tokens.elements * sizes.hidden, sizes.width)
    read = table.part(out.elements)
    result = tape.op("embed_tokens", "embedding", (read, tokens), out, saves=(tokens,), weight_bytes=table.nbytes)
    if sizes.style.scaled_embedding:
        result = tape.op("embed_tokens", "mul", (result,), out)
    return result
