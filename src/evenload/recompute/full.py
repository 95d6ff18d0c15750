"""Whole layers: `torch.utils.checkpoint`, and what MindFormers calls slicing of the kept input.

Under tensor parallelism without sequence parallelism every rank keeps the same layer input. Sliced, each keeps its part
of 1/ranks, and backward gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, cast

import torch
from torch import distributed
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as checkpointing

from evenload.errors import EvenloadError
from evenload.recompute._torch_private import version
from evenload.recompute.errors import changed_since
from evenload.recompute.wrappers import tensors, unwrap

Group = distributed.ProcessGroup
_CHECKPOINTING: Final = cast("Any", checkpointing)
_COLLECTIVES: Final = cast("Any", distributed)


def run_whole(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], slicing: Slicing | None
) -> Any:
    """Run a layer so that backward runs all of it again, from its arguments."""
    names, count = tuple(kwargs), len(args)  # `run` lives until backward: it must not hold the arguments themselves

    def run(*everything: Any) -> Any:
        named = dict(zip(names, everything[count:], strict=True))
        return forward(*everything[:count], **named)

    everything = (*args, *kwargs.values())  # by position, so that names such as `use_reentrant` stay the layer's own
    source = next(tensors(everything), None)
    if slicing is None or source is None or not slicing.useful(source):
        return _CHECKPOINTING.checkpoint(run, *everything, use_reentrant=False)
    with saved_tensors_hooks(slicing.hook(source), _gathered):
        return _CHECKPOINTING.checkpoint(run, *everything, use_reentrant=False)


class Slice(NamedTuple):
    """One rank's part of a tensor that all ranks of a group have."""

    part: torch.Tensor
    size: torch.Size
    group: Group


class Whole(NamedTuple):
    """A tensor that stays as it is."""

    tensor: torch.Tensor
    version: int


class Slicing:
    """Keeps one part in as many as there are ranks of a layer's input."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._equal: dict[tuple[torch.Size, torch.dtype], bool] = {}
        self.notice: str | None = None
        """Why the input is kept whole, where it is."""

    def useful(self, source: torch.Tensor) -> bool:
        """Whether a layer's input can be sliced, and whether that gains anything."""
        plain = unwrap(source)[0]
        ranks = self._group.size()
        if plain is None or plain is not source:
            self.notice = "the input is divided over the ranks already"
        elif source.is_leaf:
            return False  # alive in any case: the model's own input
        elif not source.is_contiguous() or source.numel() % ranks:
            self.notice = f"the input is not contiguous, or cannot be divided by {ranks}"
        elif not self._same_on_all_ranks(source):
            self.notice = "the input is divided over the ranks already (sequence parallelism), so slicing gains nothing"
        else:
            return True
        return False

    def hook(self, source: torch.Tensor) -> Callable[[torch.Tensor], Slice | Whole]:
        """A saved-tensor hook that slices one tensor and keeps all others."""
        address, shape = source.data_ptr(), source.shape  # autograd holds on to the hook: it must not hold the tensor

        def pack(tensor: torch.Tensor) -> Slice | Whole:
            if tensor.data_ptr() != address or tensor.shape != shape:
                return Whole(tensor if tensor.is_leaf else tensor.detach(), version(tensor))
            ranks, rank = self._group.size(), self._group.rank()
            part = tensor.detach().view(-1).chunk(ranks)[rank].clone()
            return Slice(part, tensor.shape, self._group)

        return pack

    def _same_on_all_ranks(self, source: torch.Tensor) -> bool:
        """Whether all ranks hold the same tensor: asked once for every shape, because it takes a collective."""
        key = (source.shape, source.dtype)
        if key not in self._equal:
            values = source.detach().double()
            digest = torch.stack((values.sum(), values.square().sum()))
            digests = [torch.empty_like(digest) for _ in range(self._group.size())]
            _COLLECTIVES.all_gather(digests, digest, group=self._group)
            self._equal[key] = all(torch.equal(one, digest) for one in digests)
        return self._equal[key]


def _gathered(packed: Slice | Whole) -> torch.Tensor:
    if isinstance(packed, Whole):
        if version(packed.tensor) != packed.version:
            raise changed_since("the input of a layer that is recomputed", packed.version, version(packed.tensor))
        return packed.tensor
    whole = packed.part.new_empty(packed.size.numel())
    _COLLECTIVES.all_gather_single(whole, packed.part, group=packed.group)
    return whole.view(packed.size)


def sharing_ranks(layer: torch.nn.Module, name: str, group: Group | None) -> Group:
    """The ranks over which a layer is divided by tensor parallelism.

    Raises:
        EvenloadError: nothing in the layer is divided, or it is divided in more than one way.
    """
    if group is not None:
        return group
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  # slow to import, and needed only here

    for parameter in layer.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            names = mesh.mesh_dim_names or ()
            if mesh.ndim == 1:
                return mesh.get_group()
            if "tp" in names:
                return mesh.get_group("tp")
    raise EvenloadError(
        f"`slice_activation` is on, but no parameter of layer {name!r} says which ranks share it",
        where="$.policy.slice_activation",
        fix="give the process group: apply(..., tensor_group=mesh['tp'].get_group())",
    )


def divided_by_fsdp(layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The layers whose parameters FSDP gathers when they run."""
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415  # slow to import, and needed only here

    return [layer for layer in layers if isinstance(layer, FSDPModule)]


def gather_again(layer: torch.nn.Module, again: bool) -> None:
    """Let FSDP free a layer's gathered parameters after forward and gather them again in backward, or keep them."""
    cast("Any", layer).set_reshard_after_forward(again, recurse=True)
