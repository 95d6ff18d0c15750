"""What the tests of recomputation measure: bytes by the allocator, operators by a dispatch mode, gradients by bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves


def gradients(module: torch.nn.Module) -> list[torch.Tensor | None]:
    """Copies of the gradients of all parameters."""
    return [None if one.grad is None else one.grad.detach().clone() for one in module.parameters()]


def backward(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of one forward and backward, with the same random numbers every time."""
    model.zero_grad()
    torch.manual_seed(3)
    forward().backward()
    return gradients(model)


def same(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    """Whether two lists of gradients are equal to the bit."""
    pairs = zip(ours, theirs, strict=True)
    return all((one is None) == (two is None) and (one is None or torch.equal(one, two)) for one, two in pairs)


VIEWS = frozenset({"detach", "as_strided", "view", "t", "alias"})


class Operators(TorchDispatchMode):
    """Counts the aten operators that run; views compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def allocated(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """(bytes left when `run` is over, highest point on the way, what it returned), by the allocator's events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return level, peak, result


class Alive(TorchDispatchMode):
    """Bytes of the storages that operators made and that are still there, as they are now.

    Where other threads let go of memory, the allocator's events do not show it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        before = {_storage(tensor).cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            reference = _storage(tensor)
            if reference.cdata not in before:
                self._made[reference.cdata] = reference
        return result

    @property
    def nbytes(self) -> int:
        """Bytes now."""
        left = [one for one in self._made.values() if not one.expired()]
        return sum(torch.UntypedStorage._new_with_weak_ptr(one.cdata).nbytes() for one in left)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
