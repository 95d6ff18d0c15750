"""What the families share: the decoder value, attention sizes, sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from evenload.errors import Notice
from evenload.model.blocks import COMMON, Names, block, embedding, head
from evenload.model.keys import MOST_LAYERS, Keys
from evenload.model.spec import Attention, Experts, FeedForward, LatentAttention, Layer, Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """The layers that a family reads from a configuration, without embedding and head."""

    hidden: int
    vocabulary: int
    blocks: tuple[Layer, ...]
    mtp: tuple[Layer, ...] = ()
    final_softcap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture family."""

    name: str
    """Its `model_type`."""
    build: Callable[[Keys], Decoder]
    tied: bool = False
    """Whether embedding and head share their weight where the configuration does not say."""
    omitted: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    """Sizes that `transformers` leaves out of a nested `text_config` where they equal the class default.

    Width, layer count and feed-forward width are never taken from here: without them a file says too little.
    """


def assemble(
    decoder: Decoder,
    *,
    name: str,
    family: str,
    tied: bool,
    max_positions: int | None,
    source: str,
    ignored: tuple[str, ...],
    notices: tuple[Notice, ...],
) -> Model:
    """The model around a decoder: embedding, blocks, MTP layers, head."""
    return Model(
        name=name,
        family=family,
        hidden=decoder.hidden,
        vocabulary=decoder.vocabulary,
        layers=(
            embedding(decoder.hidden, decoder.vocabulary),
            *decoder.blocks,
            *decoder.mtp,
            head(decoder.hidden, decoder.vocabulary, tied=tied),
        ),
        tied=tied,
        final_softcap=decoder.final_softcap,
        max_positions=max_positions,
        source=source,
        ignored=ignored,
        notices=notices,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes that every family states."""

    hidden: int
    vocabulary: int
    layers: int


def read_sizes(keys: Keys) -> Sizes:
    """Width, vocabulary and layer count."""
    if keys.has("per_layer_config"):
        keys.refuse("per_layer_config", "layers with sizes of their own are not supported", "remove per_layer_config")
    return Sizes(
        hidden=keys.size("hidden_size"),
        vocabulary=keys.size("vocab_size"),
        layers=keys.size("num_hidden_layers", most=MOST_LAYERS),
    )


def read_attention(
    keys: Keys,
    hidden: int,
    *,
    kv_fallback: int | None = None,
    head_dim_fallback: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    softcap: float | None = None,
) -> Attention:
    """Heads, key/value heads and head width.

    Args:
        keys: the configuration.
        hidden: width between layers.
        kv_fallback: key/value heads if the key is absent; None: as many as heads. A null always means as many as heads.
        head_dim_fallback: head width if the key is absent; None: hidden / heads.
        qkv_bias: biases on the projections of q, k and v.
        out_bias: bias on the output projection.
        qk_norm: norm over each head of q and k.
        softcap: tanh limit of the scores.

    Raises:
        EvenloadError: the key/value heads do not divide the heads, or the heads do not divide the width.
    """
    heads = keys.size("num_attention_heads")
    kv_heads = (
        keys.optional("num_key_value_heads", absent=heads)
        if kv_fallback is None
        else keys.assume("num_key_value_heads", kv_fallback)
    )
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        origin = "" if keys.has("num_key_value_heads") else " (assumed, the key is missing)"
        keys.refuse(
            "num_key_value_heads",
            f"num_key_value_heads {kv_heads}{origin} does not divide num_attention_heads {heads}",
            f"use one of {_near_divisors(heads, kv_heads)}",
        )
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(keys, hidden, heads, head_dim_fallback),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        softcap=softcap,
    )


def _head_dim(keys: Keys, hidden: int, heads: int, fallback: int | None) -> int:
    given = keys.optional("head_dim") if fallback is None else keys.assume("head_dim", fallback)
    if given is not None:
        return given
    if hidden % heads:
        keys.refuse(
            "num_attention_heads",
            f"num_attention_heads {heads} does not divide hidden_size {hidden}, and head_dim is missing",
            "add head_dim, or correct one of the two",
        )
    return hidden // heads


def layer_windows(
    keys: Keys, layers: int, window: int | None, default: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """The attention window of every layer, from `layer_types` or from the family's own rule.

    Args:
        keys: the configuration.
        layers: number of layers.
        window: width of a sliding layer, None for full attention everywhere.
        default: whether layer i slides if there is no `layer_types`.
    """
    types = keys.choices("layer_types", layers, ("full_attention", "sliding_attention"))
    if types is not None:
        return tuple(window if word == "sliding_attention" else None for word in types)
    return tuple(window if default(i) else None for i in range(layers))


def make_blocks(
    hidden: int,
    attentions: Sequence[Attention | LatentAttention],
    feed_forwards: Sequence[FeedForward | Experts],
    *,
    norms: int = 2,
    names: Names = COMMON,
    shared_bias: bool = False,
) -> tuple[Layer, ...]:
    """One layer per pair of halves; equal pairs share one value, so a deep model stays small."""

    @cache
    def one(attention: Attention | LatentAttention, feed_forward: FeedForward | Experts) -> Layer:
        return block(
            hidden, attention, feed_forward, norms=4 if norms == 4 else 2, names=names, shared_bias=shared_bias
        )

    return tuple(one(a, f) for a, f in zip(attentions, feed_forwards, strict=True))


def windowed(attention: Attention, windows: Sequence[int | None]) -> list[Attention]:
    """The same attention with the window of every layer."""
    return [replace(attention, window=window) for window in windows]


def _near_divisors(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return ", ".join(str(d) for d in sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:3]))
