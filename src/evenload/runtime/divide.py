"""Divides a chunk further: its layers over ranks (tensor parallelism), and its parameters over replicas (FSDP2)."""

from __future__ import annotations

from torch import nn

from evenload.errors import EvenloadError
from evenload.plan.plan import Plan
from evenload.runtime.anatomy import Passed
from evenload.runtime.parallel import apply_tensor_parallel
from evenload.runtime.parts import Parts
from evenload.runtime.ranks import Ranks
from evenload.runtime.replicas import without_data
from evenload.runtime.sharding import apply_data_parallel
from evenload.runtime.stages import Chunk, Skipped
from evenload.setup import Setup


def divide(chunk: Chunk, plan: Plan, ranks: Ranks) -> None:
    """Divide a chunk as a plan says, in place; replicas that divide nothing come later (`replicated`).

    Raises:
        EvenloadError: it has modules that nobody knows how to divide.
    """
    sharded = ranks.dp_mesh is not None and plan.setup.zero > 0
    if ranks.tp_mesh is None and not sharded:
        return
    parts = chunk_parts(chunk)
    if ranks.tp_mesh is not None:
        apply_tensor_parallel(parts, ranks.tp_mesh, sequence_parallel=plan.setup.sequence_parallel)
    if ranks.dp_mesh is not None and sharded:
        again = plan.policy.optimizer_comm
        apply_data_parallel(chunk, parts, ranks.dp_mesh, plan.setup, gather_again=again)


def replicated(chunk: Chunk, plan: Plan, ranks: Ranks) -> nn.Module:
    """What a stage calls: the chunk itself, or where replicas divide nothing what adds up their gradients.

    It has buckets of its own, so it comes when the chunk has its memory. Replicas begin with the same values, because
    those depend on the seed alone.
    """
    if ranks.dp_mesh is None or plan.setup.zero > 0:
        return chunk
    model = apply_data_parallel(chunk, Parts(layers=()), ranks.dp_mesh, plan.setup, equalize=False)
    if ranks.stands_for is not None:
        without_data(model, ranks.dp_mesh.get_group())
    return model


def chunk_parts(chunk: Chunk) -> Parts:
    """The parts of a chunk: what holds parameters before its layers, and the norm and the head after them.

    Raises:
        EvenloadError: there is more than that.
    """
    inside = f"{chunk.container}."
    ends = [name for name in chunk.full_names if not name.startswith(inside)]
    owners = {name.rpartition(".")[0]: chunk.model.get_submodule(name.rpartition(".")[0]) for name in ends}
    before = [module for path, module in owners.items() if _used(chunk, path, before=True)]
    after = [module for path, module in owners.items() if _used(chunk, path, before=False)]
    norms = [module for module in after if _is_norm(module)]
    heads = [module for module in after if not _is_norm(module)]
    if len(before) > 1 or len(norms) > 1 or len(heads) > 1 or "" in owners:
        raise EvenloadError(
            f"chunk {chunk.place.index} has more at its ends than an embedding, a norm and a head: "
            f"{', '.join(path or 'the model itself' for path in owners)}",
            where="$.layers",
            fix="train this model with tp 1 and dp 1",
        )
    return Parts(
        layers=tuple(chunk.layers) if chunk.place.layers else (),
        embedding=before[0] if before else None,
        norm=norms[0] if norms else None,
        head=heads[0] if heads else None,
    )


def local_hidden(hidden: Passed, setup: Setup) -> Passed:
    """What one rank sends of the hidden states: its part of the sequence, where that is divided."""
    if not setup.sequence_parallel:
        return hidden
    sequences, tokens, *rest = hidden.shape
    return Passed(shape=(sequences, tokens // setup.tp, *rest), dtype=hidden.dtype)


def _used(chunk: Chunk, path: str, *, before: bool) -> bool:
    names = chunk.anatomy.before if before else chunk.anatomy.after
    return any(name.rpartition(".")[0] == path for name in names) and not isinstance(
        chunk.model.get_submodule(path), Skipped
    )


def _is_norm(module: nn.Module) -> bool:
    return all(parameter.dim() == 1 for parameter in module.parameters())
