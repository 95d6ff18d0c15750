"""Final norm, output projection and loss on the last stage."""

from __future__ import annotations

from evenload.model import Model
from evenload.profile.eager.embedding import INDEX
from evenload.profile.eager.linear import linear
from evenload.profile.eager.norms import FP32, rms_norm
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape


def head(tape: Tape, source: Ref, model: Model, sizes: Sizes) -> Ref:
    """Loss of one micro-batch (transformers: `ForCausalLMLoss`).

    Logits are converted to fp32, their log-softmax is kept. While it is made, the logits in both types are alive too:
    the module still names them. In backward three fp32 tensors of that size meet: the log-softmax, its gradient and
    the gradient of the logits.
    """
    normed = rms_norm(tape, "norm", source, sizes.hidden, one_plus_weight=sizes.style.one_plus_weight)
    logits = linear(tape, "lm_head", normed, sizes.hidden, sizes.vocabulary)
    full = Out(logits.elements, logits.width)
    if model.final_softcap is not None:
        logits = tape.op("", "div", (logits,), full)
        logits = tape.op("", "tanh", (logits,), full, saves_results=(0,))
        logits = tape.op("", "mul", (logits,), full)
    return _cross_entropy(tape, logits, sizes)


def _cross_entropy(tape: Tape, logits: Ref, sizes: Sizes) -> Ref:
    wide = logits
    if sizes.upcast:
        wide = tape.op("", "float", (logits,), Out(logits.elements, FP32), aten="_to_copy")
    named = logits.nbytes if sizes.upcast else 0  # alive by its name only
    labels = _next_tokens(tape, sizes)
    logged = tape.op(
        "",
        "cross_entropy",
        (wide,),
        Out(logits.elements, FP32),
        aten="_log_softmax",
        saves_results=(0,),
        scratch=named,
    )
    return tape.op(
        "",
        "cross_entropy",
        (logged, labels),
        Out(1, FP32),
        aten="nll_loss_forward",
        saves=(logged, labels),
        scratch=named + wide.nbytes,
    )


def _next_tokens(tape: Tape, sizes: Sizes) -> Ref:
    """Labels moved by one: padded at the end, then cut at the front, which copies unless there is one sequence."""
    labels = tape.held("labels", sizes.tokens, INDEX)
    longer = Out(sizes.batch * (sizes.seq + 1), INDEX, differentiable=False)
    padded = tape.op("", "pad", (labels,), longer, aten="constant_pad_nd")
    if sizes.batch == 1:
        return padded
    return tape.op("", "contiguous", (padded,), Out(sizes.tokens, INDEX, differentiable=False), aten="clone")
