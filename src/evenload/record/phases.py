"""Where the step is: phase, micro-batch and module, from hooks that PyTorch offers and from the backward graph."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.autograd.function import BackwardCFunction

from evenload.ledger.ledger import Mark
from evenload.ledger.log import Log
from evenload.ledger.words import MarkKind, Phase
from evenload.record._torch_private import LEAF, next_sequence_number
from evenload.record.sequence import Origin, Sequence
from evenload.record.storages import Storages
from evenload.record.where import Where

_OTHER: Final = Phase.OTHER.code
_FORWARD: Final = Phase.FORWARD.code
_BACKWARD: Final = Phase.BACKWARD.code
_RECOMPUTE: Final = Phase.RECOMPUTE.code
_OPTIMIZER: Final = Phase.OPTIMIZER.code


class Phases:
    """The state machine of a training step.

    Forward begins at the first call of a module, or where the backward graph begins to grow. It lasts until backward,
    so that a loss computed outside modules belongs to it. Backward lasts as long as the call. In it, operators that
    record a graph of their own are recomputation, unless the whole backward does.
    """

    def __init__(self, log: Log, storages: Storages, where: Where) -> None:
        self.where = where
        self.resting = True
        """Outside all phases: the one state in which an operator may begin forward by itself."""
        self._log = log
        self._storages = storages
        self._sequence = Sequence()
        self._modules: list[int] = []
        self._node: type = object
        """Class of the node that backward evaluated last."""
        self._owners: dict[int, int] = {}
        self._backwards: list[bool] = []
        """For every backward call that runs, innermost last: whether it records a graph."""
        self._depth = 0
        """Modules that were open when the outermost backward began."""
        self._tasks: list[int] = []
        self._optimizers = 0
        self._counted = -1
        self._fixed: int | None = None
        self._seen = next_sequence_number()
        """Sequence number that was next when an operator last ran, as far as that was asked."""
        self._after_backward = True
        self.implied = False
        """In a backward that was not started through `torch.autograd`, so that nobody says when it ends."""

    # Modules

    def enter_module(self, module: int) -> None:
        """A module's forward begins."""
        self._modules.append(module)
        self._at(module)

    def leave_module(self) -> None:
        """The innermost module's forward ends."""
        if self._modules:
            self._modules.pop()
        self._at(self._modules[-1] if self._modules else -1)

    @property
    def depth(self) -> int:
        """How many modules are running, each inside the one before."""
        return len(self._modules)

    def unwind(self, depth: int) -> None:
        """No more than so many modules are running: an exception has ended the others."""
        if len(self._modules) > depth:
            del self._modules[depth:]
            self._at(self._modules[-1] if self._modules else -1)

    @property
    def outermost(self) -> bool:
        """Whether no module is running."""
        return not self._modules

    def owner(self, parameter: Any) -> int | None:
        """Module that a parameter belongs to, where known."""
        return self._owners.get(id(parameter))

    def own(self, owners: dict[int, int]) -> None:
        """Say which modules parameters belong to: identity of the parameter -> position of the path in the strings."""
        self._owners = owners

    def line(self, frame: int) -> None:
        """An operator of this Python line begins to run; its node in the backward graph has been made already."""
        number = next_sequence_number()
        if frame != self.where.frame:
            self.where.frame = frame
            self._note(self._seen)
        self._seen = number

    @property
    def in_kernel_of_backward(self) -> bool:
        """Whether PyTorch's own backward of an operator runs, and no Python code of the user."""
        return self.where.phase == _BACKWARD and not issubclass(self._node, BackwardCFunction)

    def _at(self, module: int) -> None:
        self.where.module = module
        self._note(next_sequence_number())

    def _note(self, number: int) -> None:
        where = self.where
        self._sequence.note(number, Origin(where.module, where.micro_batch, where.frame))

    # Phases

    @property
    def grown(self) -> bool:
        """Whether the backward graph has grown outside all phases."""
        return next_sequence_number() != self._seen

    def look(self, *, differentiated: bool) -> None:
        """The backward graph has grown outside all phases: perhaps forward has begun.

        It has if autograd differentiates the operator that runs. If not, a function may be running, and what is made
        from here on belongs to forward if an operator that is differentiated follows before anything else begins.

        Args:
            differentiated: autograd differentiates the operator.
        """
        if differentiated:
            self._storages.confirm_suspects(_FORWARD, self._next_micro_batch())
            self._begin_forward(self._seen)
        else:
            self._storages.suspect()

    def begin_forward(self) -> None:
        """Forward of a micro-batch begins, or goes on in another module."""
        self._begin_forward(next_sequence_number())

    def _next_micro_batch(self) -> int:
        if self._fixed is not None:
            return self._fixed
        return self._counted + 1 if self._after_backward else self._counted

    def _begin_forward(self, number: int) -> None:
        self.resting = False
        if self.where.phase == _FORWARD:
            return
        micro_batch = self._next_micro_batch()
        if self._after_backward:
            self._counted += 1
        self._after_backward = False
        self._change(_FORWARD, micro_batch)
        self._note(number)

    def fix_micro_batch(self, number: int | None) -> None:
        """Say which micro-batch forward works on from now on; None: count them again."""
        self._fixed = number
        if self.where.phase == _FORWARD:
            self._change(_FORWARD, self._counted if number is None else number)
            self._note(next_sequence_number())

    def end_forward(self) -> None:
        """The outermost module returned: with a graph, the loss is still to come; without, this was all."""
        if not torch.is_grad_enabled():
            self._rest()

    def begin_backward(self, *, graph: bool) -> None:
        """A backward call begins; `graph`: it is recorded for another one."""
        if not self._backwards:
            self._depth = len(self._modules)
        if self.resting:  # a forward that consists of functions only
            self._storages.confirm_suspects(_FORWARD, self._next_micro_batch())
        self._backwards.append(graph)
        self.where.graph = graph
        self.resting = False
        self._change(_BACKWARD, self.where.micro_batch)

    def end_backward(self) -> None:
        """The innermost backward call returned."""
        self._backwards.pop()
        self.where.graph = self._backwards[-1] if self._backwards else False
        if not self._backwards:
            self.implied = False
            self._tasks.clear()
            self._after_backward = True
            self._rest()

    @property
    def nested(self) -> bool:
        """Whether a backward runs inside another one."""
        return len(self._backwards) > 1

    def in_backward(self, task: int, number: int | None, node: Any) -> None:
        """An operator runs inside backward.

        Args:
            task: number of the backward that runs.
            number: sequence number of the node that is evaluated.
            node: that node.
        """
        if not self._backwards:  # started by code that does not go through torch.autograd
            self.begin_backward(graph=False)
            self.implied = True
        if not self._tasks:
            self._tasks.append(task)
        where = self.where
        self._node = type(node)
        inside = len(self._modules) > self._depth
        graded = torch.is_grad_enabled()  # is off inside the forward of a custom function, also when it runs again
        again = inside and (graded or task == self._tasks[0])
        recompute = again or (graded and not self._backwards[-1])
        origin = None
        if number == LEAF:
            owner = self._owners.get(id(node.variable))
            module, micro_batch = (where.module if owner is None else owner), where.micro_batch
        elif number is None:
            module, micro_batch = where.module, where.micro_batch
        else:
            origin = self._sequence.find(number, here=task != self._tasks[0])
            module, micro_batch = origin.module, origin.micro_batch
        if recompute:
            module = self._modules[-1] if inside else module
        self._change(_RECOMPUTE if recompute else _BACKWARD, micro_batch)
        where.module = module
        if origin is not None:
            where.frame = origin.frame

    def begin_optimizer(self) -> None:
        """An optimizer's step begins."""
        self._optimizers += 1
        self.resting = False
        self._change(_OPTIMIZER, -1)

    def end_optimizer(self) -> None:
        """An optimizer's step ends."""
        self._optimizers = max(0, self._optimizers - 1)
        self._rest()

    def begin_step(self) -> None:
        """A training step begins: micro-batches count from 0 again."""
        self._counted = -1
        self._after_backward = True

    def _rest(self) -> None:
        """What comes after a phase: the one around it, or none."""
        if self._backwards:
            self._change(_BACKWARD, self.where.micro_batch)
        elif self._optimizers:
            self._change(_OPTIMIZER, -1)
        else:
            self.resting = True
            self._seen = next_sequence_number()
            self._change(_OTHER, -1)
        self._at(self._modules[-1] if self._modules else -1)

    def _change(self, phase: int, micro_batch: int) -> None:
        where = self.where
        if where.phase != phase:
            self._storages.drop_suspects()
            index = self._storages.settle()
            self._log.mark(
                Mark(kind=MarkKind.PHASE, index=index, time=self._log.now(), value=phase, micro_batch=micro_batch)
            )
            where.move(phase, micro_batch)
        elif where.micro_batch != micro_batch:
            where.move(phase, micro_batch)
