"""Cross entropy: what is alive when the largest tensors of a model meet."""

from __future__ import annotations

from evenload.profile.eager.embedding import BOOL, INDEX, masked_numbers
from evenload.profile.eager.norms import FP32
from evenload.profile.hardware import sent_bytes
from evenload.profile.sizes import Sizes
from evenload.profile.tape import Out, Ref, Tape


def cross_entropy(tape: Tape, logits: Ref, sizes: Sizes) -> Ref:
    """Loss of one micro-batch (transformers: `ForCausalLMLoss`).

    Logits are converted to fp32 and their log-softmax is kept. While it is made, the logits of both types are alive
    too: the calling functions still name them. In backward three fp32 tensors of that size meet: the log-softmax, its
    gradient and the gradient of the logits.
    """
    wide = logits
    low = logits.width != FP32
    if low:
        wide = tape.op("float", (logits,), logits.like(width=FP32), aten="_to_copy")
    named = logits.nbytes if low and not sizes.pipelined else 0  # alive by its name only
    labels = _next_tokens(tape, sizes)
    if sizes.tp > 1:
        return _parallel(tape, wide, labels, named, sizes)
    logged = tape.op("cross_entropy", (wide,), wide.like(), aten="_log_softmax", saves_results=(0,), scratch=named)
    return tape.op(
        "cross_entropy",
        (logged, labels),
        Out(1, FP32),
        aten="nll_loss_forward",
        saves=(logged, labels),
        scratch=named + wide.nbytes,
    )


def _next_tokens(tape: Tape, sizes: Sizes) -> Ref:
    """Labels moved by one: padded at the end, then cut at the front, which copies unless there is one sequence."""
    labels = tape.shared("labels", sizes.tokens, INDEX)
    longer = Out(sizes.batch * (sizes.seq + 1), INDEX, differentiable=False)
    padded = tape.op("pad", (labels,), longer, aten="constant_pad_nd")
    if sizes.batch == 1:
        return padded
    return tape.op("contiguous", (padded,), Out(sizes.tokens, INDEX, differentiable=False), aten="clone")


def _parallel(tape: Tape, wide: Ref, labels: Ref, named: int, sizes: Sizes) -> Ref:
    """Loss over a vocabulary that is divided over tensor-parallel ranks: they exchange one number a token.

    For autograd this is a log-softmax and a choice, as on one rank; the parts between make no gradients. Backward
    writes `(chosen + exp(log-softmax)) * gradient` out, so that four tensors meet.
    Source: PyTorch, `torch.distributed.tensor.parallel.loss_parallel`.
    """
    name, rows = "cross_entropy", Out(sizes.tokens, FP32, differentiable=False)
    apart = Out(wide.elements, FP32, differentiable=False)
    alive = named + wide.nbytes

    def summed(value: Ref) -> Ref:
        sent = sent_bytes("all_reduce", value.nbytes, sizes.tp)
        return tape.op(name, (value,), rows, aten="all_reduce", comm="all_reduce", comm_bytes=sent, scratch=alive)

    largest = summed(tape.op(name, (wide,), rows, aten="amax", scratch=named))
    shifted = tape.op(name, (wide, largest), wide.like(), aten="sub", scratch=named)
    powers = tape.op(name, (shifted,), apart, aten="exp", scratch=alive)
    total = summed(tape.op(name, (powers,), rows, aten="sum", scratch=alive))
    total = tape.op(name, (total,), rows, aten="log", scratch=alive)
    logged = tape.op(name, (shifted, total), wide.like(), aten="sub", saves_results=(0,), scratch=alive)
    return _chosen(tape, logged, labels, sizes, alive)


def _chosen(tape: Tape, logged: Ref, labels: Ref, sizes: Sizes, alive: int) -> Ref:
    """The label's own number, which one rank has, and the mean over the tokens that count."""
    name = "cross_entropy"
    flags, numbers = Out(sizes.tokens, BOOL, differentiable=False), Out(sizes.tokens, INDEX, differentiable=False)
    rows = Out(sizes.tokens, FP32)
    counted = tape.op(name, (labels,), flags, aten="ne")
    safe = tape.op(name, (counted, labels), numbers, aten="where")
    own = masked_numbers(tape, safe, name)
    twice = 2 * logged.nbytes
    chosen = tape.op(name, (logged, own), rows, aten="gather", scratch=alive, backward_scratch=twice)
    sent = sent_bytes("all_reduce", chosen.nbytes, sizes.tp)
    chosen = tape.op(name, (chosen,), rows, aten="all_reduce", comm="all_reduce", comm_bytes=sent)
    chosen = tape.op(name, (chosen,), rows, aten="neg")
    counted = tape.op(name, (labels,), flags, aten="ne")
    chosen = tape.op(name, (counted, chosen), rows, aten="where")
    total = tape.op(name, (chosen,), Out(1, FP32), aten="sum")
    counted = tape.op(name, (labels,), flags, aten="ne")
    count = tape.op(name, (counted,), Out(1, INDEX, differentiable=False), aten="sum")
    return tape.op(name, (total, count), Out(1, FP32), aten="div", saves=(logged, labels))
