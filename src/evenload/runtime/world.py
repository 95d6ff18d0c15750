"""Ranks that do not exist: one process stands for one rank of a run, and what it sends goes nowhere."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evenload.errors import EvenloadError
from evenload.runtime._torch_private import FakeStore, forget_meshes
from evenload.setup import Setup

DIMENSIONS = ("pp", "dp", "tp")
"""Of the mesh, outermost first: ranks that share a layer are neighbours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank stands in the mesh."""

    pp: int
    """Pipeline stage."""
    dp: int
    """Replica."""
    tp: int


def place_of(rank: object, setup: Setup) -> Place:
    """Where a rank stands.

    Raises:
        EvenloadError: there is no such rank.
    """
    world = setup.devices
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world:
        raise EvenloadError(
            f"there is no rank {rank!r} of {world}",
            where="--rank",
            fix=f"give a number from 0 to {world - 1}" if world > 1 else "leave it out, or give the degrees",
        )
    pp, rest = divmod(rank, setup.dp * setup.tp)
    return Place(pp=pp, dp=rest // setup.tp, tp=rest % setup.tp)


def first_rank(stage: int, setup: Setup) -> int:
    """The first rank of a pipeline stage."""
    return stage * setup.dp * setup.tp


def make_mesh(setup: Setup) -> DeviceMesh:
    """The mesh of a run, [pp, dp, tp], on the process group that there is."""
    return init_device_mesh("cpu", (setup.pp, setup.dp, setup.tp), mesh_dim_names=DIMENSIONS)


@contextmanager
def simulated(rank: int, world: int) -> Generator[None]:
    """Be one rank of a run of many, for as long as the block lasts.

    Raises:
        EvenloadError: this process is a rank of a real run.
    """
    if distributed.is_initialized():
        raise EvenloadError(
            "this process belongs to a process group already, and cannot stand for another rank",
            fix="run it in a process of its own, without torchrun",
        )
    distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
        forget_meshes()
