"""Dense decoders: Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Phi-3.

Defaults for absent keys are those of the configuration classes of `transformers` 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from evenload.model.blocks import Names
from evenload.model.families.common import (
    Decoder,
    Family,
    layer_windows,
    make_blocks,
    read_attention,
    read_sizes,
    windowed,
)
from evenload.model.keys import MOST, Keys, as_mapping
from evenload.model.spec import FeedForward

_DEFAULT_WINDOW: Final = 4096


def _llama(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    bias = keys.flag("attention_bias")
    attention = read_attention(keys, sizes.hidden, qkv_bias=bias, out_bias=bias)
    feed_forward = _feed_forward(keys, bias=keys.flag("mlp_bias"))
    return Decoder(
        hidden=sizes.hidden,
        vocabulary=sizes.vocabulary,
        blocks=make_blocks(sizes.hidden, [attention] * sizes.layers, [feed_forward] * sizes.layers),
    )


def _mistral(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    attention = read_attention(keys, sizes.hidden, kv_fallback=8)
    window = keys.assume("sliding_window", _DEFAULT_WINDOW)
    return Decoder(
        hidden=sizes.hidden,
        vocabulary=sizes.vocabulary,
        blocks=make_blocks(
            sizes.hidden, windowed(attention, [window] * sizes.layers), [_feed_forward(keys)] * sizes.layers
        ),
    )


def _qwen2(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    attention = read_attention(keys, sizes.hidden, kv_fallback=32, qkv_bias=True)
    windows = _qwen_windows(keys, sizes.layers)
    return Decoder(
        hidden=sizes.hidden,
        vocabulary=sizes.vocabulary,
        blocks=make_blocks(sizes.hidden, windowed(attention, windows), [_feed_forward(keys)] * sizes.layers),
    )


def _qwen3(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    bias = keys.flag("attention_bias")
    attention = read_attention(
        keys, sizes.hidden, kv_fallback=32, head_dim_fallback=128, qkv_bias=bias, out_bias=bias, qk_norm=True
    )
    windows = _qwen_windows(keys, sizes.layers)
    return Decoder(
        hidden=sizes.hidden,
        vocabulary=sizes.vocabulary,
        blocks=make_blocks(sizes.hidden, windowed(attention, windows), [_feed_forward(keys)] * sizes.layers),
    )


def _gemma2(keys: Keys) -> Decoder:
    def slides(layer: int) -> bool:
        return layer % 2 == 0

    window = keys.assume("sliding_window", _DEFAULT_WINDOW)
    return _gemma(keys, window, slides, qk_norm=False, softcap=50.0, final_softcap=30.0)


def _gemma3(keys: Keys) -> Decoder:
    window = keys.assume("sliding_window", _DEFAULT_WINDOW)
    if window is not None and keys.flag("use_bidirectional_attention"):
        window = window // 2 + 1  # to both sides
    pattern = keys.optional("sliding_window_pattern", absent=6) or 6

    def slides(layer: int) -> bool:
        return (layer + 1) % pattern != 0

    return _gemma(keys, window, slides, qk_norm=True, softcap=None, final_softcap=None)


def _gemma(
    keys: Keys,
    window: int | None,
    slides: Callable[[int], bool],
    *,
    qk_norm: bool,
    softcap: float | None,
    final_softcap: float | None,
) -> Decoder:
    sizes = read_sizes(keys)
    bias = keys.flag("attention_bias")
    attention = read_attention(
        keys,
        sizes.hidden,
        kv_fallback=4,
        head_dim_fallback=256,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=qk_norm,
        softcap=keys.number("attn_logit_softcapping", absent=softcap),
    )
    windows = layer_windows(keys, sizes.layers, window, slides)
    feed_forward = _feed_forward(keys, activation=keys.activation("hidden_activation", absent="gelu_pytorch_tanh"))
    return Decoder(
        hidden=sizes.hidden,
        vocabulary=sizes.vocabulary,
        blocks=make_blocks(sizes.hidden, windowed(attention, windows), [feed_forward] * sizes.layers, norms=4),
        final_softcap=keys.number("final_logit_softcapping", absent=final_softcap),
    )


def _phi3(keys: Keys) -> Decoder:
    sizes = read_sizes(keys)
    attention = read_attention(keys, sizes.hidden)
    attention = replace(attention, rotary_dim=_rotary_dim(keys, attention.head_dim))
    window = keys.optional("sliding_window")
    return Decoder(
        hidden=sizes.hidden,
        vocabulary=sizes.vocabulary,
        blocks=make_blocks(
            sizes.hidden,
            windowed(attention, [window] * sizes.layers),
            [_feed_forward(keys)] * sizes.layers,
            names=Names(fused=True),
        ),
    )


def _rotary_dim(keys: Keys, head_dim: int) -> int | None:
    """Width of the rotated part of a head, if it is not all of it (`Phi3RotaryEmbedding`)."""
    factor = keys.number("partial_rotary_factor", absent=1.0)
    if not keys.has("partial_rotary_factor") and as_mapping(keys.mapping.get("rope_parameters")) is not None:
        factor = keys.inner("rope_parameters").number("partial_rotary_factor", absent=1.0)
    width = int(head_dim * (factor or 1.0))
    if not 0 < width <= head_dim:
        keys.refuse(
            "partial_rotary_factor",
            f"partial_rotary_factor is {factor}, which leaves {width} of {head_dim} elements to rotate",
            "use a number above 0, up to 1",
        )
    return None if width == head_dim else width


def _feed_forward(keys: Keys, *, bias: bool = False, activation: str | None = None) -> FeedForward:
    return FeedForward(
        intermediate=keys.size("intermediate_size"),
        bias=bias,
        activation=activation or keys.activation("hidden_act", absent="silu"),
    )


def _qwen_windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
    """Qwen: full attention unless `use_sliding_window`, then sliding from layer `max_window_layers` on."""
    window = keys.assume("sliding_window", _DEFAULT_WINDOW) if keys.flag("use_sliding_window") else None
    first = keys.size("max_window_layers", fallback=28, least=0, most=MOST) if window is not None else 0
    return layer_windows(keys, layers, window, lambda layer: layer >= first)


LLAMA: Final = Family(name="llama", build=_llama, omitted={"vocab_size": 32000, "num_attention_heads": 32})
MISTRAL: Final = Family(name="mistral", build=_mistral, omitted={"vocab_size": 32000, "num_attention_heads": 32})
QWEN2: Final = Family(name="qwen2", build=_qwen2, omitted={"vocab_size": 151936, "num_attention_heads": 32})
QWEN3: Final = Family(name="qwen3", build=_qwen3, omitted={"vocab_size": 151936, "num_attention_heads": 32})
GEMMA2: Final = Family(
    name="gemma2", build=_gemma2, tied=True, omitted={"vocab_size": 256000, "num_attention_heads": 8}
)
GEMMA3: Final = Family(
    name="gemma3_text", build=_gemma3, tied=True, omitted={"vocab_size": 262208, "num_attention_heads": 8}
)
PHI3: Final = Family(name="phi3", build=_phi3, omitted={"vocab_size": 32064, "num_attention_heads": 32})
