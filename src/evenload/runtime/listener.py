"""Hears the collectives of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import distributed

from evenload.ledger.words import PHASES
from evenload.record.core import Core
from evenload.record.tensors import flat
from evenload.runtime._torch_private import group_named
from evenload.runtime.collectives import Collective

_NAMES: Final = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}
"""How operators begin -> what they do; the first that fits."""


class Listener:
    """Notes every collective that a core sees from the step that it is told to begin with."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._now: list[Collective] = []
        self._before: list[Collective] = []
        core.mode.heard = self._heard
        core.steps.began.append(self._begins)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Those of the last step, in order."""
        return tuple(self._now or self._before)

    def _begins(self, _begins: Sequence[int]) -> None:
        self._now, self._before = [], self._now

    def _heard(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = flat((args, kwargs, result))
        where = self._core.where
        module = where.module
        if module < 0 and tensors:  # outside modules, where an optimizer adds gradients up
            module = self._core.storages.module_of(tensors[0])
        self._now.append(
            Collective(
                name=_name(operator),
                ranks=_ranks((*args, *kwargs.values())),
                phase=PHASES[where.phase].value,
                module=self._core.log.text(module) if module >= 0 else None,
                nbytes=max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0),
            )
        )


def _name(operator: Any) -> str:
    name = operator.name().partition("::")[2].partition(".")[0].lstrip("_")
    return next((word for begin, word in _NAMES.items() if name.startswith(begin)), name)


def _ranks(args: tuple[Any, ...]) -> int:
    """Size of the group that an operator is given, by its name or as an object; 0: it is not told."""
    for one in args:
        if isinstance(one, torch.ScriptObject):
            try:
                return distributed.ProcessGroup.unbox(one).size()
            except RuntimeError:  # an object of another class, such as the kind of reduction
                continue
    for one in reversed(args):
        if isinstance(one, str):
            try:
                return group_named(one).size()
            except (RuntimeError, ValueError, LookupError):
                continue
    return 0
