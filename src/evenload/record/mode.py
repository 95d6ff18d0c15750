"""The dispatch mode: sees every operator, says where the step is, and hands it to the storages.

It reads no data, so real, fake and meta tensors are all the same to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import torch

from evenload.ledger.cells import UPPER
from evenload.ledger.ledger import Mark
from evenload.ledger.log import Log
from evenload.ledger.words import MarkKind, Role
from evenload.record._torch_private import LEAF, DispatchMode, current_node, graph_task, sequence_number
from evenload.record.guard import Guard
from evenload.record.operators import Traits, TraitsTable
from evenload.record.phases import Phases
from evenload.record.storages import Storages
from evenload.record.tensors import arguments, is_wrapper

_ASKED: Final = re.compile(r"allocate (\d+) bytes")
_NOTHING: Final[dict[str, Any]] = {}


class LedgerMode(DispatchMode):
    """Writes what every operator allocates, uses and frees.

    Under a `FakeTensorMode`, enter that one first and this one inside it, so that this one sees the operators as they
    were called.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        log: Log,
        phases: Phases,
        storages: Storages,
        *,
        fake: bool = False,
        locate: Callable[[], None] | None = None,
        ended: Callable[[], None] | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Make the mode.

        Args:
            log: where events go.
            phases: knows where the step is.
            storages: follow what is alive.
            fake: whether tensors are fake: collectives are then not waited for.
            locate: called before every operator that may allocate, to note Python lines.
            ended: called after every operator: synchronizes devices.
            guard: what a failure in here comes to.
        """
        DispatchMode.__init__(self)
        self.met: Callable[[type], None] = _nothing
        """Called with every class of wrapped tensors (DTensor) when it is first met."""
        self.heard: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None
        """Called with every collective that has run: operator, arguments, keywords, result."""
        self.paused = 0
        """Above zero, operators are nobody's memory: PyTorch tries shapes out."""
        self._log = log
        self._phases = phases
        self._storages = storages
        self._fake = fake
        self._locate = locate
        self._ended = ended
        self._guard = Guard() if guard is None else guard
        self._traits = TraitsTable(log)
        self._known = self._traits.known
        self._wrappers: set[type] = set()

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and log it."""
        if types and self._wrapped(types):
            return NotImplemented  # the wrapper calls operators on what it holds, and those are seen
        kwargs = kwargs or _NOTHING
        if self.paused:  # nothing may be written: this may be a child of the recorded process
            return func(*args, **kwargs)
        try:
            traits = self._begins(func, args, kwargs)
        except Exception as error:  # noqa: BLE001  # whatever happens in the recorder
            self._guard.caught(error)
            traits = None
        if traits is None:
            return func(*args, **kwargs)
        if traits.waits and self._fake:
            return args[0]  # the fake kernel returns a copy, the real one its argument
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            self._failed(traits, error)
            raise
        if self._ended is not None:
            self._ended()  # what it raises is the device's: an operator that ran before has failed
        try:
            self._storages.ran(traits, args, kwargs, result)
            if traits.talks and self.heard is not None:
                self.heard(func, args, kwargs, result)
        except Exception as error:  # noqa: BLE001
            self._guard.caught(error)
        return result

    def _begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traits | None:
        """An operator is about to run; None: it is none that makes or uses memory."""
        traits = self._known.get(func) or self._traits.add(func)
        if traits.passes:
            if traits.detach and graph_task() >= 0:
                self._handed_over(args)
            return None
        if traits.waits and self._fake:
            return traits
        self._place()
        if self._phases.resting and self._phases.grown:
            self._phases.look(differentiated=_differentiated(traits, args, kwargs))
        return traits

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Log that Python code has resized a storage, as FSDP does."""
        if not self.paused:
            self._place()
            self._storages.resized(storage, (self._log.string("storage.resize_") + 1) << UPPER)

    def appeared(self, tensor: torch.Tensor, name: str) -> None:
        """Log a tensor that PyTorch made without any operator; `name` says what did."""
        if not self.paused:
            self._place()
            self._storages.appeared(tensor, (self._log.string(name) + 1) << UPPER)

    def _place(self) -> None:
        phases = self._phases
        if (task := graph_task()) >= 0:
            node = current_node()
            phases.in_backward(task, sequence_number(node) if node is not None else None, node)
        elif phases.implied:
            phases.end_backward()
        if self._locate is not None:
            self._locate()

    def _handed_over(self, args: tuple[Any, ...]) -> None:
        """Backward detaches what it hands over to a leaf: this is the parameter's gradient."""
        node = current_node()
        if node is not None and sequence_number(node) == LEAF:
            leaf = node.variable
            owner = self._phases.owner(leaf)
            # A checkpoint that runs backward inside backward makes leaves of its inputs; their gradients are passed on.
            if owner is not None or isinstance(leaf, torch.nn.Parameter) or not self._phases.nested:
                self._storages.mark(args[0], Role.GRADIENT, owner)

    def _wrapped(self, types: tuple[type, ...]) -> bool:
        for kind in types:
            if is_wrapper(kind):
                if kind not in self._wrappers:
                    self._wrappers.add(kind)
                    self.met(kind)
                return True
        return False

    def _failed(self, traits: Traits, error: Exception) -> None:
        text = str(error)
        asked = _ASKED.search(text)
        if asked is None and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return
        self._log.mark(
            Mark(
                kind=MarkKind.FAILED,
                index=self._storages.settle(),
                time=self._log.now(),
                value=int(asked[1]) if asked else 0,
                micro_batch=self._phases.where.micro_batch,
                text=f"{traits.name}: {text.splitlines()[0] if text else type(error).__name__}",
            )
        )


def _nothing(_kind: type) -> None:
    """Nobody wants to know."""


def _differentiated(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd may differentiate an operator: its node in the graph is made just before it runs."""
    tensors = arguments(traits.tensors, args, kwargs) if torch.is_grad_enabled() else ()
    return any(tensor.requires_grad for tensor in tensors)
