"""Which place this process has among the ranks of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evenload.errors import EvenloadError
from evenload.plan.plan import Plan
from evenload.runtime.world import DIMENSIONS

Group = distributed.ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """One process, and the groups that it is in."""

    rank: int
    """Among all processes."""
    world: int
    stage: int
    """Rank of the pipeline."""
    pp: int
    pp_group: Group | None
    """The ranks of this pipeline."""
    device: torch.device
    replica: int = 0
    """Rank among the data-parallel replicas."""
    tp_mesh: DeviceMesh | None = None
    """The ranks that share each layer; None: there are none."""
    dp_mesh: DeviceMesh | None = None
    """The replicas; None: there are none."""
    stands_for: str | None = None
    """In a rehearsal, the kind of the device that the run is for."""


def device_mesh(plan: Plan) -> DeviceMesh:
    """The mesh of a plan, [pp, dp, tp], of all processes: ranks that share a layer are neighbours."""
    setup = plan.setup
    return init_device_mesh(own_device().type, (setup.pp, setup.dp, setup.tp), mesh_dim_names=DIMENSIONS)


def find_ranks(plan: Plan, mesh: DeviceMesh | None, device: torch.device | str | None) -> Ranks:
    """This process's place.

    Raises:
        EvenloadError: there is no process group, or its processes are not as many as the plan's.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        raise EvenloadError(
            "no process group is there yet",
            fix="start the script with torchrun, and call torch.distributed.init_process_group first",
        )
    rank, world = distributed.get_rank(), distributed.get_world_size()
    names = tuple(mesh.mesh_dim_names or ()) if mesh is not None else ()
    if mesh is None:
        if plan.setup.devices > plan.setup.pp:
            raise EvenloadError(
                "the plan has degrees beside pp, and no mesh is given",
                where="$.setup",
                fix="pass evenload.runtime.device_mesh(plan)",
            )
        group = distributed.group.WORLD
    else:
        if "pp" not in names:
            raise EvenloadError(f"the mesh has the dimensions {names}, and none is called pp", where="$.mesh")
        group = mesh.get_group("pp")
    size = cast("Any", group).size()
    sizes = dict(zip(names, mesh.shape, strict=True)) if mesh is not None else {}
    wrong = [name for name in ("dp", "tp") if sizes.get(name, 1) != getattr(plan.setup, name)]
    if size != plan.setup.pp or world != plan.setup.devices or wrong:
        raise EvenloadError(
            f"the plan is for {plan.setup.devices} processes with pp {plan.setup.pp}, "
            f"and {world} run, {size} of them in this pipeline",
            where="$.setup.pp",
            fix=f"start as many: torchrun --nproc-per-node {plan.setup.devices} ...",
        )
    return Ranks(
        rank=rank,
        world=world,
        stage=distributed.get_rank(group),
        pp=size,
        pp_group=group,
        device=torch.device(device) if device is not None else own_device(),
        replica=mesh.get_local_rank("dp") if mesh is not None and "dp" in names else 0,
        tp_mesh=_part(mesh, "tp"),
        dp_mesh=_part(mesh, "dp"),
    )


def _part(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """One dimension of a mesh; None: it has one rank."""
    if mesh is None or name not in (mesh.mesh_dim_names or ()):
        return None
    part = mesh[name]
    return part if part.size() > 1 else None


def own_device() -> torch.device:
    """This process's GPU where the process group is for GPUs, else the CPU."""
    if "nccl" in str(distributed.get_backend()).lower() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
