"""Layers of Llama 3 8B and a Mixtral-like mixture, written out by hand for tests of sizes."""

from __future__ import annotations

from evenload.model import Attention, Experts, FeedForward, Layer, Model, Split, Tensor

HIDDEN, HEADS, KV, HEAD_DIM, WIDTH, VOCABULARY = 4096, 32, 8, 128, 14336, 128256

EMBEDDING = Layer(
    kind="embedding",
    role="embedding",
    tensors=(Tensor(name="embed_tokens.weight", shape=(VOCABULARY, HIDDEN), split=Split.VOCABULARY),),
)
ATTENTION = (
    Tensor(name="self_attn.q_proj.weight", shape=(HEADS * HEAD_DIM, HIDDEN), split=Split.TENSOR),
    Tensor(name="self_attn.k_proj.weight", shape=(KV * HEAD_DIM, HIDDEN), split=Split.KEY_VALUE),
    Tensor(name="self_attn.v_proj.weight", shape=(KV * HEAD_DIM, HIDDEN), split=Split.KEY_VALUE),
    Tensor(name="self_attn.o_proj.weight", shape=(HIDDEN, HEADS * HEAD_DIM), split=Split.TENSOR),
)
NORMS = (
    Tensor(name="input_layernorm.weight", shape=(HIDDEN,)),
    Tensor(name="post_attention_layernorm.weight", shape=(HIDDEN,)),
)
DENSE = Layer(
    kind="dense",
    role="block",
    tensors=(
        *ATTENTION,
        *NORMS,
        Tensor(name="mlp.gate_proj.weight", shape=(WIDTH, HIDDEN), split=Split.TENSOR),
        Tensor(name="mlp.up_proj.weight", shape=(WIDTH, HIDDEN), split=Split.TENSOR),
        Tensor(name="mlp.down_proj.weight", shape=(HIDDEN, WIDTH), split=Split.TENSOR),
    ),
    attention=Attention(heads=HEADS, kv_heads=KV, head_dim=HEAD_DIM),
    feed_forward=FeedForward(intermediate=WIDTH),
)
MOE = Layer(
    kind="moe",
    role="block",
    tensors=(
        *ATTENTION,
        *NORMS,
        Tensor(name="mlp.gate.weight", shape=(8, HIDDEN)),
        Tensor(name="mlp.experts.gate_up_proj", shape=(8, 2 * WIDTH, HIDDEN), split=Split.EXPERT),
        Tensor(name="mlp.experts.down_proj", shape=(8, HIDDEN, WIDTH), split=Split.EXPERT),
    ),
    attention=DENSE.attention,
    feed_forward=Experts(experts=8, top_k=2, intermediate=WIDTH),
)
HEAD = Layer(
    kind="head",
    role="head",
    tensors=(
        Tensor(name="norm.weight", shape=(HIDDEN,)),
        Tensor(name="lm_head.weight", shape=(VOCABULARY, HIDDEN), split=Split.VOCABULARY),
    ),
    norms=1,
)
TIED_HEAD = Layer(kind="head", role="head", tensors=HEAD.tensors[:1], norms=1)


def model(*blocks: Layer, tied: bool = False) -> Model:
    return Model(
        name="test",
        family="llama",
        hidden=HIDDEN,
        vocabulary=VOCABULARY,
        layers=(EMBEDDING, *blocks, TIED_HEAD if tied else HEAD),
        tied=tied,
    )


LLAMA = model(*[DENSE] * 32)
