"""The `Setup` value: how a model is trained, before any choice of layout or recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from evenload.errors import EvenloadError, Notice, did_you_mean, shown
from evenload.model import Attention, Experts, Layer, Model

DType = Literal["fp32", "bf16", "fp16", "fp8"]
WIDTH: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one element."""

_MOST: Final = {
    **dict.fromkeys(("pp", "tp", "cp", "ep", "etp"), 2**12),
    "dp": 2**18,
    "interleave": 2**10,
    "micro_batch": 2**16,
    "micro_batches": 2**16,
    "seq": 2**26,
}
"""Larger values are typing errors, and would take hours to lay out."""
_MOST_DEVICES: Final = 2**20
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
        for name, most in _MOST.items():
            value = getattr(self, name)
            if name == "etp" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise EvenloadError(
                    f"{name} is {shown(value)}", where=f"$.{name}", fix="give a whole number of at least 1"
                )
            if value > most:
                raise EvenloadError(
                    f"{name} is {shown(value)}, which no run has",
                    where=f"$.{name}",
                    fix=f"check it; at most {most} is read",
                )
        for name, known in _WORDS.items():
            _check_word(name, getattr(self, name), known)
        for name in ("sequence_parallel", "master_weights"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "master_weights" and value is None):
                raise EvenloadError(f"{name} is {shown(value)}", where=f"$.{name}", fix="give true or false")
        if self.devices > _MOST_DEVICES:
            raise EvenloadError(
                f"pp * tp * cp * dp is {self.devices} devices, which no run has",
                where="$.dp",
                fix=f"check the degrees; at most {_MOST_DEVICES} devices are read",
            )
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


def _check_word(name: str, value: object, known: tuple[object, ...]) -> None:
    if any(value == word and type(value) is type(word) for word in known):
        return
    words = [str(word) for word in known if word is not None]
    hint = did_you_mean(value, words) if isinstance(value, str) else None
    raise EvenloadError(f"{name} is {shown(value)}", where=f"$.{name}", fix=hint or f"use one of {', '.join(words)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """What one degree must fulfil."""

    fact: str
    """What is wrong if it does not hold, after the name and the value of the degree."""
    holds: Callable[[int], bool]
    """Whether a value of the degree is legal, all others as they are."""


def check_setup(model: Model, setup: Setup) -> tuple[Notice, ...]:
    """Raise if the degrees do not divide what they must divide.

    Returns:
        What is legal, but without effect or beyond what the model was made for.

    Raises:
        EvenloadError: with the degree, the size it must divide, and the nearest values that break none of its rules.
    """
    if setup.ep > 1 and not _has_experts(model):
        raise EvenloadError(f"ep is {setup.ep}, but {model.name} has no experts", where="$.ep", fix="leave ep at 1")
    if setup.chunks > len(model.blocks):
        raise EvenloadError(
            f"pp {setup.pp} x interleave {setup.interleave} needs {setup.chunks} chunks, "
            f"but {model.name} has {len(model.blocks)} layers",
            where="$.pp" if setup.pp > 1 else "$.interleave",
            fix=f"lower them until pp x interleave is at most {len(model.blocks)}",
        )
    for degree, rules in (
        ("ep", _expert_rules(model, setup)),
        ("tp", _tensor_rules(model, setup)),
        ("etp", _expert_tensor_rules(model, setup)),
        ("cp", _context_rules(setup)),
    ):
        value = setup.expert_tp if degree == "etp" else getattr(setup, degree)
        broken = next((rule for rule in rules if not rule.holds(value)), None)
        if broken is not None:
            raise EvenloadError(
                f"{degree} {value} {broken.fact}", where=f"$.{degree}", fix=_legal_values(degree, value, rules)
            )
    return _notices(model, setup)


def _expert_rules(model: Model, setup: Setup) -> list[_Rule]:
    """`ep` deals whole experts to the ranks of one stage."""
    rules = [
        _divides(layer.feed_forward.experts, f"the {{size}} experts of a {layer.kind} layer")
        for layer in model.kinds()
        if isinstance(layer.feed_forward, Experts)
    ]
    return [*rules, _divides(setup.tp * setup.cp * setup.dp, "the {size} ranks of a stage (tp * cp * dp)")]


def _tensor_rules(model: Model, setup: Setup) -> list[_Rule]:
    """`tp` deals heads and columns; key and value heads may be repeated where there are fewer than ranks."""
    rules: list[_Rule] = []
    for layer in model.kinds():
        if layer.attention is not None:
            rules.append(_divides(layer.attention.heads, f"the {{size}} attention heads of a {layer.kind} layer"))
        if isinstance(layer.attention, Attention):
            rules.append(_key_value_rule(layer, layer.attention.kv_heads, setup.backend))
        if isinstance(layer.feed_forward, Experts):
            shared = layer.feed_forward.shared_intermediate
            rules.append(_divides(shared, f"the width {{size}} of the shared experts of a {layer.kind} layer"))
        elif layer.feed_forward is not None:
            width = layer.feed_forward.intermediate
            rules.append(_divides(width, f"the feed-forward width {{size}} of a {layer.kind} layer"))
    if setup.backend == "mindspore":
        rules.append(_divides(model.hidden, "the hidden width {size}, as MindFormers demands"))
    if setup.sequence_parallel:
        tokens = setup.seq // setup.cp
        rules.append(_divides(tokens, "the {size} tokens of a sequence that sequence parallelism divides"))
    return rules


def _key_value_rule(layer: Layer, kv_heads: int, backend: str) -> _Rule:
    """Key and value heads are dealt, or each is held by as many ranks as there are too many.

    MindFormers does not repeat them, nor can a projection that makes query, key and value in one matrix.
    """
    fused = any(tensor.name.startswith("self_attn.qkv_proj") for tensor in layer.tensors)
    if fused or backend == "mindspore":
        why = "whose projection is fused" if fused else "which MindFormers does not repeat"
        return _divides(kv_heads, f"the {{size}} key/value heads of a {layer.kind} layer, {why}")
    return _Rule(
        fact=f"neither divides the {kv_heads} key/value heads of a {layer.kind} layer nor is a multiple of them",
        holds=lambda tp: kv_heads % tp == 0 or tp % kv_heads == 0,
    )


def _expert_tensor_rules(model: Model, setup: Setup) -> list[_Rule]:
    """`etp` divides the columns of one expert over ranks that `ep` leaves."""
    rules = [
        _divides(layer.feed_forward.intermediate, f"the expert width {{size}} of a {layer.kind} layer")
        for layer in model.kinds()
        if isinstance(layer.feed_forward, Experts)
    ]
    if not rules:
        return []
    left = setup.tp * setup.cp * setup.dp // setup.ep
    return [*rules, _divides(left, "the {size} ranks of a stage that ep leaves (tp * cp * dp / ep)")]


def _context_rules(setup: Setup) -> list[_Rule]:
    """`cp` divides the sequence; a causal mask is balanced by giving each rank an early and a late piece.

    Source: Megatron-LM's context parallelism and `torch.distributed.tensor.experimental.context_parallel`, which cut
    the sequence into 2 * cp pieces. MindFormers cuts it into cp pieces.
    """
    pieces = 1 if setup.backend == "mindspore" else 2
    return [
        _Rule(
            fact=f"cannot cut the sequence of {setup.seq} tokens into {pieces} x cp equal pieces",
            holds=lambda cp: cp == 1 or setup.seq % (pieces * cp) == 0,
        )
    ]


def _divides(size: int, what: str) -> _Rule:
    """The degree divides a size; `what` says which, with `{size}` in its place."""
    return _Rule(fact=f"does not divide {what.format(size=size)}", holds=lambda d: size % d == 0)


def _legal_values(degree: str, value: int, rules: list[_Rule]) -> str:
    legal = [d for d in range(1, _MOST[degree] + 1) if all(rule.holds(d) for rule in rules)]
    if not legal:
        return "change what it must divide"  # a rule that even 1 breaks
    *others, last = sorted(sorted(legal, key=lambda d: (abs(d - value), d))[:3])
    return f"use {', '.join(map(str, others))} or {last}" if others else f"use {last}"


def _has_experts(model: Model) -> bool:
    return any(isinstance(layer.feed_forward, Experts) for layer in model.kinds())


def _notices(model: Model, setup: Setup) -> tuple[Notice, ...]:
    notices: list[Notice] = []
    if model.max_positions is not None and setup.seq > model.max_positions:
        notices.append(
            Notice(
                fact=f"seq is {setup.seq}, but {model.name} is made for at most {model.max_positions} positions",
                where="$.seq",
            )
        )
    if setup.zero and setup.dp * setup.cp == 1:
        notices.append(
            Notice(fact=f"zero {setup.zero} divides nothing: dp * cp is 1", where="$.zero", fix="raise dp or leave out")
        )
    if setup.etp is not None and not _has_experts(model):
        notices.append(Notice(fact=f"etp changes nothing: {model.name} has no experts", where="$.etp"))
    return tuple(notices)
