"""Records what a real module does in forward: its operators, what each reads and makes, and what autograd keeps.

A storage, not a tensor, is the unit: views share the storage of their base. Names come from three places: module hooks
give the path, a function mode the name that stands in the Python code, a dispatch mode the aten operator below it.
Scalars and the states of random numbers (up to 16 bytes) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALL = 16
UNFILLED = {"new_empty", "empty_like", "zeros_like"}
"""Operators whose result says nothing until somebody writes it in place."""


Node = tuple[int, int]
"""Number of the call in progress, and of the autograd node."""


@dataclass
class Row:
    """One aten operator that made a storage or kept one for backward."""

    path: str
    name: str
    aten: str
    reads: list[int]
    made: list[int] = field(default_factory=list)
    keeps: list[int] = field(default_factory=list)


@dataclass
class Trace:
    """The operators of one forward, in order."""

    rows: list[Row]
    nbytes: dict[int, int]
    """Storage number -> bytes, in order of first sight."""
    known: dict[int, str]
    """Names of the storages that were there before: parameters, buffers, inputs."""


class _Names(TorchFunctionMode):
    """Remembers the Python name of the outermost call in progress."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[tuple[int, str]] = []
        self.calls = 0

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        self.stack.append((self.calls, getattr(func, "__name__", "")))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.stack.pop()

    def current(self) -> tuple[int, str]:
        """Number and name of the call."""
        return self.stack[-1] if self.stack else (0, "")


class _Recorder(TorchDispatchMode):
    """Sees every aten operator below autograd, and every tensor that autograd saves."""

    def __init__(self, names: _Names, path: Callable[[], str], known: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = names
        self.path = path
        self.rows: list[Row] = []
        self.numbers: dict[int, int] = {}
        self.nbytes: dict[int, int] = {}
        self.alive: list[torch.UntypedStorage] = []  # no storage may die: its address would be used again
        self.rows_of_node: dict[Node, list[Row]] = {}
        self.saved: list[tuple[Node, int]] = []
        self.known = {self.number(tensor): name for name, tensor in known.items()}

    def number(self, tensor: torch.Tensor) -> int:
        """Number of a tensor's storage, for a DTensor that of the local part."""
        storage = _local(tensor).untyped_storage()
        key = storage._cdata
        if key not in self.numbers:
            self.numbers[key] = len(self.alive)
            self.nbytes[len(self.alive)] = storage.nbytes()
            self.alive.append(storage)
        return self.numbers[key]

    def node(self) -> Node:
        """The autograd node in progress: it takes its number before its operator runs.

        Operators without a node run under the number of the one before; the call tells them apart.
        """
        return self.names.current()[0], torch._C._autograd._get_sequence_nr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # a DTensor thinks about shapes
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # come again with the local tensors
        aten = func.overloadpacket.__name__
        if aten == "detach":  # from `pack` and from autograd's own book-keeping
            return func(*args, **kwargs)
        if torch._guards.active_fake_mode() is not None:  # a DTensor thinks about shapes
            return func(*args, **kwargs)
        reads = [self.number(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        row, node = Row(self.path(), self.names.current()[1], aten, reads), self.node()
        before = len(self.alive)
        result = func(*args, **kwargs)
        self.rows_of_node.setdefault(node, []).append(row)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and self.number(leaf) >= before and self.number(leaf) not in row.made:
                row.made.append(self.number(leaf))
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            self._written(row, args[0], node)
        self.rows.append(row)
        return result

    def _written(self, row: Row, target: torch.Tensor, node: Node) -> None:
        """An in-place operator, told as if it made a new storage.

        Where it fills an empty storage, it makes that one. Where autograd cloned the old content to keep it, the clone
        and the target change places: the old storage is kept, the new one goes on.
        """
        number = self.number(target)
        maker = next((other for other in self.rows if number in other.made), None)
        last = self.rows[-1] if self.rows else None
        if maker is not None and maker.aten in UNFILLED:
            maker.made.remove(number)
            row.made.append(number)
        elif maker is not None and maker.aten == row.aten:
            maker.reads.extend(row.reads)
        elif last is not None and last.aten == "clone" and last.reads == [number] and last in self.rows_of_node[node]:
            (clone,) = last.made
            last.reads.extend(row.reads)
            self.numbers[self.alive[number]._cdata], self.numbers[self.alive[clone]._cdata] = clone, number
            self.saved = [(at, number if name == clone and at == node else name) for at, name in self.saved]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called for every save."""
        self.saved.append((self.node(), self.number(tensor)))
        return _local(tensor).detach() if isinstance(tensor, DTensor) else tensor.detach()

    def finish(self, result: torch.Tensor) -> Trace:
        """Give every save to its operator; drop scalars and the operators that only look.

        Autograd frees at once what the nodes of a call save if the result does not depend on them.
        """
        numbers = _node_numbers(result)
        alive = {call for (call, following), _ in self.saved if following - 1 in numbers}
        for node, number in self.saved:
            if node[0] not in alive:
                continue
            # a node that clones before it runs (an in-place operator) takes a number before that of its clone
            found = min(other for other in self.rows_of_node if other[0] == node[0] and other[1] >= node[1])
            rows = self.rows_of_node[found]
            ([row for row in rows if row.made] or rows)[-1].keeps.append(number)
        for row in self.rows:
            row.made = [number for number in row.made if self.nbytes[number] > SMALL]
            row.keeps = [number for number in dict.fromkeys(row.keeps) if self.nbytes[number] > SMALL]
            row.reads = [number for number in row.reads if self.nbytes[number] > SMALL and number not in row.made]
        return Trace([row for row in self.rows if row.made or row.keeps], self.nbytes, self.known)


def _node_numbers(result: torch.Tensor) -> set[int]:
    """Numbers of the autograd nodes that a result depends on."""
    found, waiting = {result.grad_fn}, [result.grad_fn]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return {node._sequence_nr() for node in found}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


@contextmanager
def _module_paths(module: torch.nn.Module) -> Iterator[Callable[[], str]]:
    stack: list[str] = []
    with ExitStack() as handles:
        for name, child in module.named_modules():
            push = child.register_forward_pre_hook(lambda *_, name=name: stack.append(name), prepend=True)
            pop = child.register_forward_hook(lambda *_: (stack.pop(), None)[1], always_call=True)
            handles.callback(push.remove)
            handles.callback(pop.remove)
        yield lambda: stack[-1] if stack else ""


def record(module: torch.nn.Module, run: Callable[[], torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> Trace:
    """Record `run()`, which calls `module` and returns a loss; paths are those of the module's children."""
    names = _Names()
    known = {**dict(module.named_parameters()), **dict(module.named_buffers()), **inputs}
    with _module_paths(module) as path:
        recorder = _Recorder(names, path, known)
        with saved_tensors_hooks(recorder.pack, lambda tensor: tensor), names, recorder:
            result = run()
    return recorder.finish(result)
