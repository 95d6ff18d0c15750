"""Memory that is neither static nor kept: pipeline buffers, gathered parameters, gradient buckets, context.

What torch.distributed.pipelining and FSDP2 hold was read in PyTorch 2.13 and measured on CPU runs of it;
each rule names its cause, so that a reader can tell when it does not hold for a run of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from evenload.model import Layer, Model, Tensor
from evenload.plan.schedule import Op, actions, find_schedule
from evenload.profile.static import computed_width, gradient_width, held_tensors, rank_elements, replicas
from evenload.setup import WIDTH, Setup
from evenload.units import GIB, MIB

CONTEXT: Final = round(0.52 * GIB)
"""Device context and loaded kernels of one process. Source: measured on H100 by pith-train, memory report."""
COMMUNICATOR: Final = round(0.39 * GIB)
"""Buffers of one NCCL communicator. Source: as above, the communicator of all ranks; smaller groups hold less."""
WORKSPACE: Final = {"h100": 32 * MIB, "h200": 32 * MIB, "b200": 32 * MIB}
"""cuBLAS workspace per device, from the caching allocator. Source: PyTorch, `CublasHandlePool.cpp`."""
SMALL_WORKSPACE: Final = 8_519_680
"""The same on other devices."""


def boundary_bytes(model: Model, setup: Setup) -> int:
    """Bytes of the hidden states that one chunk sends to the next per micro-batch and rank."""
    tokens = setup.tokens // (setup.tp if setup.sequence_parallel else 1)
    return tokens * model.hidden * WIDTH[setup.dtype]


def outside_parts(setup: Setup) -> Mapping[str, int]:
    """Memory outside the allocator: the context, and a communicator for every kind of group that has partners."""
    kinds = sum(size > 1 for size in (setup.tp, setup.cp, setup.dp, setup.pp, setup.ep))
    return {"device context": CONTEXT, **({f"{kinds} communicators": kinds * COMMUNICATOR} if kinds else {})}


def buffer_parts(
    model: Model, setup: Setup, hardware: str, stage: int, *, gather_again: bool = False
) -> Mapping[str, int]:
    """Buffers of a stage beside those of its layers, by name; only those that there are."""
    parts = {
        "pipeline send and receive buffers": pipeline_buffers(setup, boundary_bytes(model, setup), stage),
        "gathered parameters and whole gradients": gather_bytes(model, setup, gather_again=gather_again),
        "workspace of matrix products": WORKSPACE.get(hardware, SMALL_WORKSPACE),
    }
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def optimizer_transient(setup: Setup) -> Callable[[float], float] | None:
    """Parameters on the rank (bytes) -> working memory of the optimizer step.

    PyTorch's AdamW on a GPU runs its `foreach` form, which makes one temporary per parameter for all of them at once;
    the fused kernels of Megatron-LM make none. Source: `torch/optim/adamw.py`, measured: 1.0 times the parameters.
    """
    if setup.backend != "torch" or setup.optimizer != "adamw":
        return None
    return float


def layer_buffers(layer: Layer, model: Model, setup: Setup, *, gather_again: bool = False) -> int:
    """What a layer adds to its rank's buffers for the whole step.

    * DistributedDataParallel (ZeRO 0 or 1 in PyTorch) keeps gradients a second time, in its buckets: the default
      `gradient_as_bucket_view=False`.
    * FSDP in a pipeline keeps parameters gathered until the last micro-batch, because re-gathering for every
      micro-batch would cost too much (`set_reshard_after_backward(False)` in `torch.distributed.pipelining.stage`).
      With `gather_again` (MindFormers: `parallel_optimizer_comm_recompute`) they are let go after forward, but under
      ZeRO 2. Its whole gradients are counted as gradients.
    * ZeRO 2 in PyTorch keeps parameters gathered from a layer's forward to its backward: counted all the time.
    """
    if setup.backend != "torch":
        return 0
    if setup.zero <= 1:
        return _shared_bytes(layer, model, setup, gradient_width)
    stays = setup.zero == 2 or (setup.pp > 1 and not gather_again)
    return _shared_bytes(layer, model, setup, computed_width) if stays else 0


def gather_bytes(model: Model, setup: Setup, *, gather_again: bool = False) -> int:
    """Working memory of FSDP: the fullest moment of its backward.

    While the backward of one layer runs, its parameters are gathered, those of the layer before are on their way, its
    gradients are whole, and the layer after is being reduced in the type of the gradients.
    Source: `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py` (implicit prefetch, one reduction in flight).

    In a pipeline whole gradients are there anyway (see `static_of`), and parameters too unless they are gathered again
    for each micro-batch.
    """
    if setup.backend == "megatron" or setup.zero < 2 or (setup.pp > 1 and not gather_again):
        return 0
    parameters, gradients = (
        [_shared_bytes(layer, model, setup, width) for layer in model.layers]
        for width in (computed_width, gradient_width)
    )
    gathered = int(setup.zero == 3)
    whole = int(setup.pp == 1)
    return max(
        gathered * (here + before) + whole * (here + reduced)
        for before, here, reduced in zip([0, *parameters], parameters, [*gradients[1:], 0], strict=False)
    )


def _shared_bytes(layer: Layer, model: Model, setup: Setup, width: Callable[[Tensor, Setup], int]) -> int:
    """Bytes on this rank of the parameters that other ranks hold too, elements as wide as is said."""
    return sum(
        rank_elements(tensor, layer, setup) * width(tensor, setup)
        for tensor in held_tensors(layer, model, setup)
        if replicas(tensor, setup) > 1
    )


def pipeline_buffers(setup: Setup, boundary: int, stage: int) -> int:
    """Bytes that sending and receiving between stages holds on one rank, beside the layer inputs counted as kept.

    `torch.distributed.pipelining` (2.13) holds, in units of one boundary tensor:

    * a receive buffer for each micro-batch of each chunk, of hidden states unless the chunk is the first and of
      gradients unless it is the last, from the first step on; the first layer's input of a micro-batch in flight *is*
      such a buffer and is counted there;
    * the output of every micro-batch in flight, unless the chunk is the last;
    * what is being sent: under 1F1B one tensor a neighbour; under schedules with several chunks everything sent, until
      the step ends.

    Megatron-LM frees outputs once they are sent and receives into fresh tensors: one tensor a neighbour.
    """
    if setup.pp == 1:
        return 0
    neighbours = (stage > 0) + (stage < setup.pp - 1)
    if setup.backend != "torch":
        return neighbours * boundary
    name = find_schedule(setup.schedule, interleave=setup.interleave).name
    fullest = fullest_moments(name, setup.pp, setup.interleave, setup.micro_batches)[stage]
    tensors = neighbours if name == "1f1b" else 0
    for chunk, (held, done) in enumerate(zip(fullest.held, fullest.done, strict=True)):
        place = chunk * setup.pp + stage
        first, last = place == 0, place == setup.chunks - 1
        tensors += 0 if first else setup.micro_batches - held
        tensors += 0 if last else setup.micro_batches + held
        if name not in {"gpipe", "1f1b"}:
            tensors += done * ((not first) + (not last))
    return tensors * boundary


class Moment(NamedTuple):
    """A moment of one rank."""

    held: tuple[int, ...]
    """Micro-batches in flight, by chunk."""
    done: tuple[int, ...]
    """Micro-batches whose backward has ended, by chunk."""


@lru_cache(maxsize=16)
def fullest_moments(name: str, pp: int, interleave: int, micro_batches: int) -> tuple[Moment, ...]:
    """The last moment of every rank at which it has most micro-batches in flight."""
    orders = actions(name, pp=pp, interleave=interleave, micro_batches=micro_batches)
    return tuple(_last_fullest([(action.op, action.chunk) for action in order], interleave) for order in orders)


def _last_fullest(order: Sequence[tuple[Op, int]], interleave: int) -> Moment:
    held, done = [0] * interleave, [0] * interleave
    fullest = Moment(tuple(held), tuple(done))
    for op, chunk in order:
        if op is Op.FORWARD:
            held[chunk] += 1
        elif op is not Op.BACKWARD_INPUT:
            held[chunk] -= 1
            done[chunk] += 1
        if op is Op.FORWARD and sum(held) >= sum(fullest.held):
            fullest = Moment(tuple(held), tuple(done))
    return fullest
