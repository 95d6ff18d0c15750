"""Embedding and head."""

from __future__ import annotations

from evenload.model import Model
from evenload.profile.fused.linear import column, reduce
from evenload.profile.fused.norms import FP32
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape

INDEX = 8


def embedding(tape: Tape, tokens: Ref, sizes: Sizes) -> Ref:
    """Rows of the table for every token, summed over ranks that hold other rows.

    Its backward makes the gradient of the whole table before it is added to the accumulated one. Source: Megatron-LM,
    `core/tensor_parallel/layers.py` (`VocabParallelEmbedding`).
    """
    module = tape.at("embed_tokens")
    table = module.parameter("weight", sizes.vocabulary * sizes.hidden, sizes.width)
    out = Out(tokens.elements * sizes.hidden, sizes.width)
    own = tokens
    if sizes.tp > 1:
        own = module.op("sub", (tokens,), Out(tokens.elements, INDEX, differentiable=False))
    rows = module.op(
        "embedding",
        (table.part(out.elements), own),
        out,
        saves=(own,),
        backward_scratch=table.nbytes,
        weight_bytes=table.nbytes,
    )
    return reduce(module, rows, sizes)


def projected_loss(tape: Tape, normed: Ref, model: Model, sizes: Sizes) -> Ref:
    """Output projection and fused loss: the gradient of the logits is written over the logits.

    The backward of the projection, which is Megatron's own, makes a placeholder of the size of its weight for autograd.
    Sources: Megatron-LM, `core/tensor_parallel/layers.py` (`LinearWithGradAccumulationAndAsyncCommunication`);
    Transformer Engine, `pytorch/cross_entropy.py` (`--cross-entropy-loss-fusion --cross-entropy-fusion-impl te`).
    """
    weight = sizes.hidden * sizes.vocabulary * sizes.width
    logits = column(tape.at("lm_head"), normed, sizes.hidden, sizes.vocabulary, sizes, scratch=weight)
    if model.final_softcap is not None:
        logits = tape.op("softcap", (logits,), logits.like(), saves_results=(0,))
    labels = tape.shared("labels", sizes.tokens, INDEX)
    loss, _ = tape.ops(
        "cross_entropy",
        (logits, labels),
        (Out(sizes.tokens, FP32), Out(3 * sizes.tokens, FP32, "statistics", differentiable=False)),
        saves=(logits, labels),
        saves_results=(1,),
        overwrites=True,
    )
    return loss
