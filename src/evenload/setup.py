"""The `Setup` value: how a model is trained, before any choice of layout or recomputation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from evenload.errors import EvenloadError, did_you_mean
from evenload.model import Attention, Experts, LatentAttention, Model

DType = Literal["fp32", "bf16", "fp16", "fp8"]
WIDTH: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one element."""


_WORDS: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "zero": (0, 1, 2, 3),
        "dtype": tuple(WIDTH),
        "grad_dtype": (None, *WIDTH),
        "optimizer": ("adamw", "sgd", "none"),
        "optimizer_dtype": (None, *WIDTH),
        "attention": ("sdpa", "eager"),
        "backend": ("torch", "megatron", "mindspore"),
    }
)
"""Fields of `Setup` that take one of a few values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Parallel degrees, sizes, types and hardware of a training run."""

    pp: int = 1
    """Pipeline stages (ranks along the pipeline)."""
    interleave: int = 1
    """Chunks (virtual stages) per pipeline rank."""
    tp: int = 1
    """Tensor-parallel degree."""
    sequence_parallel: bool = False
    """Activations between tensor-parallel regions are divided along the sequence by `tp`."""
    cp: int = 1
    """Context-parallel degree: divides the sequence."""
    dp: int = 1
    """Data-parallel degree (replicas), not counting `cp`."""
    ep: int = 1
    """Expert-parallel degree; must divide dp * cp * tp."""
    etp: int | None = None
    """Tensor-parallel degree inside one routed expert; None: `tp`, or less where `ep` needs the ranks."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: what is divided over dp * cp: 1 optimizer states, 2 gradients too, 3 parameters too."""
    micro_batch: int = 1
    """Sequences in one micro-batch on one data-parallel replica."""
    micro_batches: int = 1
    """Micro-batches per step and replica."""
    seq: int = 4096
    """Tokens per sequence."""
    dtype: DType = "bf16"
    """Type of parameters in forward and of activations."""
    grad_dtype: DType | None = None
    """Type in which gradients are accumulated; None: as the backend does, see `gradient_dtype`."""
    master_weights: bool | None = None
    """The optimizer works on an fp32 copy of every parameter; None: as the backend does, see `main_copies`."""
    optimizer: Literal["adamw", "sgd", "none"] = "adamw"
    optimizer_dtype: DType | None = None
    """Type of the optimizer's moments; None: as the backend does, see `moment_dtype`."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """`sdpa`: fused kernel that keeps no score matrix; `eager`: matmul, softmax, matmul."""
    backend: Literal["torch", "megatron", "mindspore"] = "torch"
    """Whose operators run: decides what is kept for backward."""
    schedule: str = "1f1b"
    """Name of the pipeline schedule, see `evenload.plan.schedule`."""
    hardware: str = "h100"
    """Name of a hardware preset, see `evenload.profile.hardware`."""

    def __post_init__(self) -> None:
        for name in ("pp", "interleave", "tp", "cp", "dp", "ep", "etp", "micro_batch", "micro_batches", "seq"):
            value = getattr(self, name)
            if name == "etp" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise EvenloadError(f"{name} is {value!r}", where=f"$.{name}", fix="give a whole number of at least 1")
            if value > 2**24:
                raise EvenloadError(f"{name} is {value}, which no run has", where=f"$.{name}", fix="check the number")
        for name, known in _WORDS.items():
            _check_word(name, getattr(self, name), known)
        for name in ("sequence_parallel", "master_weights"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "master_weights" and value is None):
                raise EvenloadError(f"{name} is {value!r}", where=f"$.{name}", fix="give true or false")
        if self.sequence_parallel and self.tp == 1:
            object.__setattr__(self, "sequence_parallel", False)  # nothing to divide by

    @property
    def devices(self) -> int:
        """Devices of the whole run: pp * tp * cp * dp."""
        return self.pp * self.tp * self.cp * self.dp

    @property
    def chunks(self) -> int:
        """Chunks of the whole pipeline: pp * interleave."""
        return self.pp * self.interleave

    @property
    def main_copies(self) -> bool:
        """Parameters have fp32 main copies.

        By default Megatron-LM (`--bf16`, `--fp16`) makes them and plain PyTorch does not. fp32 parameters need none.
        """
        asked = self.backend != "torch" if self.master_weights is None else self.master_weights
        return asked and self.dtype != "fp32" and self.optimizer != "none"

    @property
    def fsdp_mixed(self) -> bool:
        """The main copies are the parameters: FSDP shards fp32 parameters and gathers them in `dtype`."""
        return self.backend == "torch" and self.zero == 3 and self.main_copies

    @property
    def parameter_dtype(self) -> DType:
        """Type in which a rank holds its parameters."""
        return "fp32" if self.fsdp_mixed else self.dtype

    @property
    def gradient_dtype(self) -> DType:
        """Type in which gradients are accumulated.

        By default that of the parameters in PyTorch, and fp32 in Megatron-LM, where bf16 turns
        `--accumulate-allreduce-grads-in-fp32` on.
        """
        return self.grad_dtype or (self.parameter_dtype if self.backend == "torch" else "fp32")

    @property
    def moment_dtype(self) -> DType:
        """Type of the optimizer's moments: by default that of what it works on, main copies or parameters."""
        return self.optimizer_dtype or ("fp32" if self.main_copies else self.parameter_dtype)

    @property
    def expert_tp(self) -> int:
        """Ranks that divide one routed expert."""
        return self.etp if self.etp is not None else math.gcd(self.tp, self.tp * self.cp * self.dp // self.ep)

    @property
    def expert_dp(self) -> int:
        """Ranks of a stage that hold the same routed experts: tp * cp * dp / (ep * expert_tp)."""
        return max(1, self.tp * self.cp * self.dp // (self.ep * self.expert_tp))

    def vocabulary_rows(self, vocabulary: int) -> int:
        """Rows of the embedding or head on one rank: padded so that every rank has as many.

        Megatron-LM pads to a multiple of 128 * tp (`--make-vocab-size-divisible-by`), others to a multiple of tp.
        """
        multiple = 128 if self.backend == "megatron" else 1
        return -(-vocabulary // (multiple * self.tp)) * multiple

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank, after context parallelism."""
        return self.micro_batch * self.seq // self.cp


def check_setup(model: Model, setup: Setup) -> None:
    """Raise if the degrees do not divide what they must divide.

    Raises:
        EvenloadError: with the degree, the size it must divide, and the nearest legal values.
    """
    for layer in model.kinds():
        if isinstance(layer.attention, Attention | LatentAttention):
            _divides("tp", setup.tp, layer.attention.heads, f"attention heads of a {layer.kind} layer")
        if isinstance(layer.attention, Attention) and setup.tp % layer.attention.kv_heads:
            _divides("tp", setup.tp, layer.attention.kv_heads, f"key/value heads of a {layer.kind} layer")
        if isinstance(layer.feed_forward, Experts):
            _divides("ep", setup.ep, layer.feed_forward.experts, f"experts of a {layer.kind} layer")
            _divides("etp", setup.expert_tp, layer.feed_forward.intermediate, "expert width")
            _divides("tp", setup.tp, layer.feed_forward.shared_intermediate, "width of the shared experts")
        elif layer.feed_forward is not None:
            _divides("tp", setup.tp, layer.feed_forward.intermediate, f"feed-forward width of a {layer.kind} layer")
    if setup.ep > 1 and not any(isinstance(layer.feed_forward, Experts) for layer in model.layers):
        raise EvenloadError(f"ep is {setup.ep}, but {model.name} has no experts", where="$.ep", fix="leave ep at 1")
    _divides("ep", setup.ep, setup.dp * setup.cp * setup.tp, "dp * cp * tp")
    _divides("etp", setup.expert_tp, setup.dp * setup.cp * setup.tp // setup.ep, "dp * cp * tp / ep")
    _divides("cp", setup.cp, setup.seq, "sequence length")
    if setup.sequence_parallel:
        _divides("tp", setup.tp, setup.seq // setup.cp, "sequence length after cp (sequence parallel)")
    if setup.chunks > max(1, len(model.blocks)):
        raise EvenloadError(
            f"pp {setup.pp} x interleave {setup.interleave} needs {setup.chunks} chunks, "
            f"but {model.name} has {len(model.blocks)} layers",
            where="$.pp",
            fix="lower pp or interleave",
        )


def _check_word(name: str, value: object, known: tuple[object, ...]) -> None:
    if any(value == word and type(value) is type(word) for word in known):
        return
    words = [str(word) for word in known if word is not None]
    hint = did_you_mean(value, words) if isinstance(value, str) else None
    raise EvenloadError(f"{name} is {value!r}", where=f"$.{name}", fix=hint or f"use one of {', '.join(words)}")


def _divides(name: str, degree: int, size: int, what: str) -> None:
    if size % degree:
        legal = [d for d in range(1, size + 1) if size % d == 0]
        near = sorted(sorted(legal, key=lambda d: abs(d - degree))[:3])
        raise EvenloadError(
            f"{name} {degree} does not divide {size} ({what})",
            where=f"$.{name}",
            fix=f"use one of {', '.join(map(str, near))}",
        )
