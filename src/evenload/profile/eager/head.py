"""Output projection and loss on the last stage."""

from __future__ import annotations

from evenload.model import Model
from evenload.profile.eager.collectives import gathered
from evenload.profile.eager.linear import linear
from evenload.profile.eager.loss import cross_entropy
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Ref, Tape


def projected_loss(tape: Tape, normed: Ref, model: Model, sizes: Sizes) -> Ref:
    """Loss from the normed hidden state. Under tensor parallelism a rank has its part of the vocabulary.

    In a pipeline the logits are what the last stage returns: the stage holds them until backward of the micro-batch has
    run. Source: PyTorch, `fwd_cache` in `torch.distributed.pipelining.stage`.
    """
    module = tape.at("lm_head")
    last = sizes.pipelined and model.final_softcap is None
    logits = linear(module, gathered(module, normed, sizes), sizes.hidden, sizes.vocabulary, keeps_result=last)
    if model.final_softcap is not None:
        logits = tape.op("div", (logits,), logits.like())
        logits = tape.op("tanh", (logits,), logits.like(), saves_results=(0,))
        logits = tape.op("mul", (logits,), logits.like(), saves_results=(0,) if sizes.pipelined else ())
    return cross_entropy(tape, logits, sizes)
