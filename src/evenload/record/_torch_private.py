"""Every private name of PyTorch that the room uses, looked up once and checked.

None of them has a public counterpart that costs as little or tells as much: which backward is running, which node of
it, where a storage lies. When a name is gone, the error says so and names the versions that work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from importlib import import_module
from operator import attrgetter, methodcaller
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch

from evenload.errors import EvenloadError

P = ParamSpec("P")
R = TypeVar("R")

LEAF: Final = 2**64 - 1
"""Sequence number of the nodes that accumulate gradients into leaves."""


def _find(path: str) -> Any:
    found: Any = sys.modules["torch"]
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        raise _missing(path)
    return found


def _missing(path: str) -> EvenloadError:
    return EvenloadError(
        f"this PyTorch ({torch.__version__}) has no torch.{path}, which recording needs",
        fix="use PyTorch 2.13 or 2.14",
    )


__import__("torch.utils._python_dispatch")
__import__("torch._subclasses.fake_tensor")

DispatchMode: Final[Any] = _find("utils._python_dispatch.TorchDispatchMode")
"""Sees every operator that reaches a kernel, after autograd and autocast have had their say."""
FakeTensor: Final[type[torch.Tensor]] = _find("_subclasses.fake_tensor.FakeTensor")
FakeTensorMode: Final[Any] = _find("_subclasses.fake_tensor.FakeTensorMode")
FakeCopyMode: Final[Any] = _find("_subclasses.fake_tensor.FakeCopyMode")
"""Copies what is copied inside it as fake tensors."""
NEEDS_DATA: Final[tuple[type[Exception], ...]] = tuple(
    _find(f"_subclasses.fake_tensor.{name}")
    for name in ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
)
"""What fake tensors raise when a result depends on data; each names the operator as `func`."""
really: Final[Callable[[], Any]] = _find("_subclasses.fake_tensor.unset_fake_temporarily")
"""A context in which operators run on real tensors."""
graph_task: Final[Callable[[], int]] = _find("_C._current_graph_task_id")
"""Number of the backward that runs in this thread; -1: none."""
current_node: Final[Callable[[], Any]] = _find("_C._current_autograd_node")
"""Node of the backward graph that is being evaluated; None: none."""
next_sequence_number: Final[Callable[[], int]] = _find("_C._autograd._get_sequence_nr")
"""Number that the next node of the backward graph made in this thread will get."""


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function ask about tensors past their classes: those of lazy modules refuse, others run code of theirs."""
    past = _find("_C.DisableTorchFunctionSubclass")

    @wraps(function)
    def asked(*args: P.args, **kwargs: P.kwargs) -> R:
        with past():
            return function(*args, **kwargs)

    return asked


def sequence_number(node: Any) -> int:
    """Number of a node of the backward graph, rising in order of the forward; `LEAF` for leaves."""
    return node._sequence_nr()  # noqa: SLF001  # the class is not public


use_count: Final[Callable[[torch.Tensor], int]] = methodcaller("_use_count")
"""References that C++ holds to a tensor, the one for its Python object included."""
address: Final[Callable[[torch.UntypedStorage], int]] = attrgetter("_cdata")
"""What tells a storage from every other living one."""
body: Final[Callable[[torch.Tensor], int]] = attrgetter("_cdata")
"""What tells a tensor from every other living one, whatever Python object stands for it."""


sparse_parts: Final[tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = (
    methodcaller("_indices"),
    methodcaller("_values"),
)
"""Indices and values of a sparse tensor, as they are."""
has_symbols: Final[Callable[[torch.Tensor], bool]] = attrgetter("_has_symbolic_sizes_strides")
"""Whether sizes are unknowns of a compiler: such a tensor is no memory, and asking for its bytes raises."""


def propagator() -> type[Any] | None:
    """The class that works out the shapes of DTensor operators, if DTensor is in use.

    It runs operators on fake tensors of global shape, which are no memory of anybody.
    """
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    return None if module is None else module.ShardingPropagator


PROPAGATE: Final = "_propagate_tensor_meta_non_cached"
"""Method of the propagator that runs operators."""


flash_attention: Final[Any] = _find("ops.aten._scaled_dot_product_flash_attention")
efficient_attention: Final[Any] = _find("ops.aten._scaled_dot_product_efficient_attention")
math_attention: Final[Any] = _find("ops.aten._scaled_dot_product_attention_math")
fused_rnn: Final[Any] = _find("ops.aten._cudnn_rnn.default")
fused_rnn_backward: Final[Any] = _find("ops.aten._cudnn_rnn_backward.default")
log_softmax_backward: Final[Any] = _find("ops.aten._log_softmax_backward_data.default")
bag: Final[Any] = _find("ops.aten._embedding_bag.default")
bag_forward_only: Final[Any] = _find("ops.aten._embedding_bag_forward_only.default")
bag_backward: Final[Any] = _find("ops.aten._embedding_bag_backward.default")
to_copy: Final[Any] = _find("ops.aten._to_copy.default")
_DESTROY: Final = "_destroy"
CONVERT: Final = "_apply"
"""Method of modules that `Module.to` and its like go through."""


TRUNCATED: Final = "_no_grad_trunc_normal_"
"""Function of `torch.nn.init` that draws until all is in range, and looks at what it drew."""


def grouped_shapes() -> tuple[Any, str, Callable[..., torch.Tensor]]:
    """What says how large a grouped product is: (module, its function with checks, and that without)."""
    module = import_module("torch._meta_registrations")
    name, shape = "_meta_grouped_mm_common", "_create_grouped_mm_output_tensor"
    for needed in (name, shape):
        if not hasattr(module, needed):
            raise _missing(f"_meta_registrations.{needed}")
    return module, name, getattr(module, shape)


operator_names: Final[Callable[[], list[str]]] = _find("_C._dispatch_get_all_op_names")
"""Every operator with its overload: `aten::softmax.int`."""
has_kernel: Final[Callable[[str, str], bool]] = _find("_C._dispatch_has_kernel_for_dispatch_key")
"""Whether an operator has a kernel for a dispatch key."""


def excluded(key: str) -> Any:
    """A context in which operators pass a dispatch key by."""
    return _find("_C._ExcludeDispatchKeyGuard")(_find("_C.DispatchKeySet")(getattr(_find("_C.DispatchKey"), key)))


def take_away(library: torch.library.Library) -> None:
    """Take away the kernels that a library has put in place."""
    getattr(library, _DESTROY)()


def foreach_tables() -> tuple[tuple[Any, ...], str, tuple[list[Any], ...]]:
    """What decides whether an optimizer runs foreach: (modules that ask a function, its name, lists of classes)."""
    name, kinds = "_get_foreach_kernels_supported_devices", "_foreach_supported_types"
    utils, optimizers = import_module("torch.utils._foreach_utils"), import_module("torch.optim.optimizer")
    for module in (utils, optimizers):
        for needed in (name, kinds):
            if not hasattr(module, needed):
                raise _missing(f"{module.__name__}.{needed}".removeprefix("torch."))
    return (utils, optimizers), name, (getattr(utils, kinds), getattr(optimizers, kinds))


@lru_cache(maxsize=1024)
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved(node: Any) -> Iterator[tuple[str, Any]]:
    """Name and content of everything that a node of the backward graph saved, as it is: no hook unpacks it."""
    if (variable := getattr(node, "variable", None)) is not None:  # a leaf, in the node that adds to its gradient
        yield "variable", variable
    for name in _saved_names(cast("type[object]", type(node))):
        try:
            found = getattr(node, name)
        except RuntimeError:  # backward has freed it
            continue
        several = isinstance(found, tuple | list)
        for one in cast("tuple[Any, ...]", found) if several else (found,):
            if one is not None and (data := _data(one)) is not None:
                yield name.removeprefix("_raw_"), data


def _data(saved_tensor: Any) -> Any:
    try:
        return saved_tensor.data
    except RuntimeError:
        return None
