"""Fused attention cores."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.profile.fused.norms import FP32
from evenload.profile.hardware import sent_bytes
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Heads of one rank and their widths."""

    query: int
    dim: int
    """Width of a query and key head."""
    value_dim: int


def core(tape: Tape, qkv: tuple[Ref, Ref, Ref], heads: Heads, sizes: Sizes) -> Ref:
    """Flash attention: keeps q, k, v, the result and an fp32 number for every row of scores. Windows cost nothing.

    Source: T. Dao, "FlashAttention-2", arXiv 2307.08691, section 3; Transformer Engine,
    `pytorch/attention/dot_product_attention/backends.py`.
    """
    query, key, value = qkv
    whole = sizes.seq * sizes.cp
    pairs = sizes.seq * (whole + 1) / 2
    read = (query, *_context(tape, key, value, sizes))
    out, _ = tape.ops(
        "flash_attention",
        read,
        (
            Out(sizes.tokens * heads.query * heads.value_dim, sizes.width),
            Out(sizes.tokens * heads.query, FP32, "logsumexp", differentiable=False),
        ),
        saves=qkv,
        saves_results=(0, 1),
        flops=2.0 * sizes.batch * heads.query * pairs * (heads.dim + heads.value_dim),
        heavy=True,
    )
    return out


def _context(tape: Tape, key: Ref, value: Ref, sizes: Sizes) -> tuple[Ref, Ref]:
    """Keys and values of the other context-parallel ranks pass by one after the other, twice; none is kept.

    Source: Transformer Engine, `pytorch/attention/dot_product_attention/context_parallel.py` (`p2p`): two buffers
    of the size of a rank's own part, and as many bytes sent as gathering would send.
    """
    if sizes.cp == 1:
        return key, value
    both = Out(key.elements + value.elements, key.width)
    sent = sent_bytes("all_gather", both.elements * both.width * sizes.cp, sizes.cp)
    passing = tape.op(
        "send_receive",
        (key, value),
        both,
        comm="all_gather",
        comm_bytes=sent,
        group="context",
        scratch=both.elements * both.width,
    )
    return passing.part(key.elements), passing.part(value.elements)
