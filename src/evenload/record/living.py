"""All storages that are alive, those included that only a backward graph holds, and freeing those of cycles."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from time import thread_time
from typing import Any

import torch

from evenload.record._torch_private import address, has_symbols, plainly, saved


@plainly
def living_tensors() -> list[torch.Tensor]:
    """Every tensor that Python knows, but for those that only stand for a shape while a compiler traces."""
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return [tensor for tensor in tensors if not has_symbols(tensor)]


@plainly
def living_storages() -> dict[int, int]:
    """Address and bytes of every storage that a Python tensor, or a backward graph behind one, refers to."""
    storages: dict[int, int] = {}
    tensors = living_tensors()
    for tensor in tensors:
        _add(storages, tensor)
    for node in graph_nodes([tensor.grad_fn for tensor in tensors]):
        for _, data in saved(node):
            if isinstance(data, torch.Tensor):
                _add(storages, data)
    return storages


def collect_all(freed: Callable[[], int], *, seconds: float = 3.0) -> bool:
    """Run the garbage collector until it frees nothing more; returns False where it was stopped before that.

    One run is not enough for cycles along one backward graph: the collector cannot look into the graph, and each run
    frees the cycle at its end, which lets go of the one before.

    Args:
        freed: a count that rises with everything that is freed.
        seconds: no run begins after that time of the processor, which a busy machine does not shorten.
    """
    end = thread_time() + seconds
    while thread_time() < end:
        before = freed()
        if gc.collect() == 0 or freed() == before:
            return True
    return False


def graph_nodes(roots: list[Any]) -> Iterator[Any]:
    """Every node of the backward graphs below some nodes, once."""
    known: dict[int, Any] = {}
    pending = deque(roots)
    while pending:
        node = pending.popleft()
        if node is not None and id(node) not in known:
            known[id(node)] = node
            pending.extend(following for following, _ in node.next_functions)
            yield node


def _add(storages: dict[int, int], tensor: torch.Tensor) -> None:
    if has_symbols(tensor):
        return
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, opaque, or without a storage
        return
    storages[address(storage)] = storage.nbytes()
    if tensor.is_leaf and tensor.grad is not None and tensor.grad is not tensor:
        _add(storages, tensor.grad)
