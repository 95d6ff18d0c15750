"""Every private name of PyTorch that the room uses, looked up once and checked.

None of them has a public counterpart that costs as little or tells as much: which backward is running, which node of
it, where a storage lies. When a name is gone, the error says so and names the versions that work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any, Final

import torch

from evenload.errors import EvenloadError

LEAF: Final = 2**64 - 1
"""Sequence number of the nodes that accumulate gradients into leaves."""


def _find(path: str) -> Any:
    found: Any = sys.modules["torch"]
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        raise EvenloadError(
            f"this PyTorch ({torch.__version__}) has no torch.{path}, which recording needs",
            fix="use PyTorch 2.13 or 2.14",
        )
    return found


__import__("torch.utils._python_dispatch")
__import__("torch._subclasses.fake_tensor")

DispatchMode: Final[Any] = _find("utils._python_dispatch.TorchDispatchMode")
"""Sees every operator that reaches a kernel, after autograd and autocast have had their say."""
FakeTensor: Final[type[torch.Tensor]] = _find("_subclasses.fake_tensor.FakeTensor")
graph_task: Final[Callable[[], int]] = _find("_C._current_graph_task_id")
"""Number of the backward that runs in this thread; -1: none."""
current_node: Final[Callable[[], Any]] = _find("_C._current_autograd_node")
"""Node of the backward graph that is being evaluated; None: none."""
next_sequence_number: Final[Callable[[], int]] = _find("_C._autograd._get_sequence_nr")
"""Number that the next node of the backward graph made in this thread will get."""


def sequence_number(node: Any) -> int:
    """Number of a node of the backward graph, rising in order of the forward; `LEAF` for leaves."""
    return node._sequence_nr()  # noqa: SLF001  # the class is not public


use_count: Final[Callable[[torch.Tensor], int]] = methodcaller("_use_count")
"""References that C++ holds to a tensor, the one for its Python object included."""
address: Final[Callable[[torch.UntypedStorage], int]] = attrgetter("_cdata")
"""What tells a storage from every other living one."""


def propagator() -> type[Any] | None:
    """The class that works out the shapes of DTensor operators, if DTensor is in use.

    It runs operators on fake tensors of global shape, which are no memory of anybody.
    """
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    return None if module is None else module.ShardingPropagator


PROPAGATE: Final = "_propagate_tensor_meta_non_cached"
"""Method of the propagator that runs operators."""
