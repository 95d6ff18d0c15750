"""Sizes of one micro-batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from evenload.model import Model
from evenload.profile.styles import Style, style_of
from evenload.setup import WIDTH, Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a rank sees of one micro-batch, after tensor, sequence and context parallelism."""

    batch: int
    seq: int
    """Tokens of a sequence on this rank where it is not divided by sequence parallelism: `seq / cp`."""
    hidden: int
    width: int
    """Bytes of an element of parameters, and of activations that no autocast narrows."""
    tp: int
    sequence_parallel: bool
    cp: int
    ep: int
    expert_tp: int
    """Ranks that divide one routed expert."""
    vocabulary: int
    """Rows of the embedding or head on this rank."""
    attention: str
    """`sdpa` or `eager`."""
    style: Style
    """What the family does in its own way."""
    pipelined: bool = False
    """The layers are dealt to stages of a pipeline."""

    @property
    def tokens(self) -> int:
        """Tokens inside a tensor-parallel region."""
        return self.batch * self.seq

    @property
    def shard(self) -> int:
        """Tokens between tensor-parallel regions: divided by `tp` under sequence parallelism."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def exchanges_rows(self) -> bool:
        """Tokens are sent to the ranks of their experts; else every tensor-parallel rank has a part of all experts."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def upcast(self) -> bool:
        """Norms, softmax and loss run in fp32: a lower type is converted on the way."""
        return self.width != WIDTH["fp32"]


def local_sizes(model: Model, setup: Setup) -> Sizes:
    """Sizes of one micro-batch of a model on one rank of a setup."""
    return Sizes(
        batch=setup.micro_batch,
        seq=setup.seq // setup.cp,
        hidden=model.hidden,
        width=max(WIDTH[setup.dtype], WIDTH["bf16"]),  # fp8 is for products; what is between them is wider
        tp=setup.tp,
        sequence_parallel=setup.sequence_parallel,
        cp=setup.cp,
        ep=setup.ep,
        expert_tp=setup.expert_tp,
        vocabulary=setup.vocabulary_rows(model.vocabulary),
        attention=setup.attention,
        style=style_of(model.family),
        pipelined=setup.pp > 1,
    )
