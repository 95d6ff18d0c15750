"""A parameter that is used at both ends of a model: both ends have a copy, and its gradient is the sum of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from evenload.errors import EvenloadError
from evenload.recompute.wrappers import unwrap
from evenload.runtime.ranks import Ranks
from evenload.runtime.stages import Chunk


class Tied:
    """Keeps the copies of the first and of the last stage equal, where they are on different ranks."""

    def __init__(self, chunk: Chunk, tied: Sequence[tuple[str, ...]], ranks: Ranks, *, other: int) -> None:
        """Take the values of the first stage.

        Args:
            chunk: this rank's end of the model.
            tied: names in the whole model of every tied parameter.
            ranks: this process's place.
            other: rank of the pipeline that holds the other end.
        """
        self._ranks = ranks
        self._other: Final = other
        local = {full: name for name, full in chunk.full_names.items()}
        self.parameters: list[nn.Parameter] = [
            chunk.model.get_parameter(next(local[name] for name in names if name in local)) for names in tied
        ]
        """Own copies."""
        self.copy = not chunk.place.first
        """Whether these are the copies: norms over all parameters count the others."""
        for parameter in self.parameters:
            there = self._exchanged(parameter)
            if self.copy:
                with torch.no_grad():
                    _plain(parameter).copy_(there)

    def add_gradients(self) -> None:
        """Give both copies the sum of their gradients. Sums of two are the same on both sides, to the bit."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if isinstance(parameter, DTensor):  # the two ends may have divided their gradients otherwise
                gradient = cast("DTensor", parameter.grad)
                parameter.grad = gradient.redistribute(placements=parameter.placements)
            _plain(parameter.grad).add_(self._exchanged(parameter.grad))

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        mine = _plain(tensor).detach().contiguous()
        theirs = torch.empty_like(mine)
        peer, group = distributed.get_global_rank(cast("Any", self._ranks.pp_group), self._other), self._ranks.pp_group
        sending = distributed.P2POp(distributed.isend, mine, peer, group)
        receiving = distributed.P2POp(distributed.irecv, theirs, peer, group)
        for work in distributed.batch_isend_irecv([sending, receiving]):
            work.wait()
        return theirs


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has."""
    plain, _ = unwrap(tensor)
    if plain is None:
        raise EvenloadError("a tied parameter is of a kind whose local part is unknown")
    return plain
