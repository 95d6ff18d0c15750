"""Every private name of torch that this room uses, and nothing else.

Each is a small function with a meaning of its own, so that a torch version that renames something breaks here, once,
with an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch._dynamo.eval_frame import OptimizedModule  # a dispatch mode would import it late, and hold its frames
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from evenload.errors import EvenloadError

__all__ = [
    "AsyncCollectiveTensor",
    "FakeTensor",
    "StorageWeakRef",
    "TorchDispatchMode",
    "at_end_of_backward",
    "gathers_again",
    "global_hook_dictionaries",
    "graph_task",
    "hook_dictionaries",
    "in_functorch",
    "is_compiled",
    "is_empty",
    "is_wrapper",
    "is_wrapper_type",
    "kind_of",
    "next_node",
    "outer_saved_tensor_hooks",
    "parameter_dictionaries",
    "saved_tensor_hooks_error",
    "schema",
    "storage_key",
    "tensor_dictionaries",
    "version",
    "wait",
]

TESTED: Final = "2.13"
"""The torch release that all of this was tested with."""

NO_TASK: Final = -1
"""Graph task of code that runs outside backward."""


def _found(path: str) -> Callable[..., Any]:
    """A private function of torch by its dotted path below `torch`."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise EvenloadError(
                f"torch {torch.__version__} has no torch.{path}, which recomputation needs",
                fix=f"use torch {TESTED}, with which this version of evenload is tested",
            )
    return found


_graph_task_id = _found("_C._current_graph_task_id")
_sequence_nr = _found("_C._autograd._get_sequence_nr")
_top_hooks = _found("_C._autograd._top_saved_tensors_default_hooks")
_hooks_enabled = _found("_C._autograd._saved_tensors_hooks_is_enabled")
_hooks_disabled_message = _found("_C._autograd._saved_tensors_hooks_get_disabled_error_message")
_functorch_stack = _found("_C._functorch.peek_interpreter_stack")
_queue_callback = _found("autograd.Variable._execution_engine.queue_callback")
_global_pre_hooks: dict[int, Any] = cast("Any", _found("nn.modules.module._global_forward_pre_hooks"))
_global_hooks: dict[int, Any] = cast("Any", _found("nn.modules.module._global_forward_hooks"))
_disabled_dispatch = _found("_C._disabled_torch_dispatch_impl")


def graph_task() -> int:
    """Number of the backward that runs in this thread, or `NO_TASK`."""
    return _graph_task_id()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call something once when the backward that runs now is over."""
    _queue_callback(call)


def is_compiled(module: Any) -> bool:
    """Whether `torch.compile` stands round a module, or was asked to when the module is called."""
    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


def kind_of(tensor: torch.Tensor) -> type:
    """Class of a tensor; of a fake one, the class of what it stands for."""
    if isinstance(tensor, FakeTensor):
        return torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
    return type(tensor)


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no data: a fake one, or one on the meta device."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def next_node() -> int:
    """Number that the next node of the autograd graph gets: inside an operator, one more than its own node's."""
    return _sequence_nr()


def outer_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost pair of saved-tensor hooks that is active, if any."""
    return _top_hooks(True)


def saved_tensor_hooks_error() -> str | None:
    """Why saved-tensor hooks are switched off here; None where they are not."""
    return None if _hooks_enabled() else str(_hooks_disabled_message())


def in_functorch() -> bool:
    """Whether a transform of `torch.func` (grad, vjp, vmap, ...) is running."""
    return _functorch_stack() is not None


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage as long as somebody holds it."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001  # a StorageWeakRef costs a microsecond more  # pyright: ignore[reportPrivateUsage]


def version(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was changed in place."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  # torch's documentation tells of it


def schema(func: Any) -> Any:
    """The schema of an operator: its arguments, and which of them it writes to."""
    return func._schema  # noqa: SLF001  # no public name


def gathers_again(module: Any) -> bool:
    """Whether an FSDP module frees its gathered parameters after forward, and gathers them again in backward."""
    groups = module._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001  # there is a setter but no getter
    return any(group.post_forward_mesh_info is not None for group in groups)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a functional collective has arrived."""
    return torch.ops._c10d_functional.wait_tensor(tensor)  # noqa: SLF001  # functional collectives live there


def parameter_dictionaries(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dictionaries in which a module holds its parameters and its children."""
    held = module.__dict__
    return held["_parameters"], held["_modules"]


def tensor_dictionaries(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dictionaries in which a module holds its parameters and its buffers."""
    held = module.__dict__
    return held["_parameters"], held["_buffers"]


def hook_dictionaries(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """The dictionaries of the hooks that run when a module is called; each hook has a number of its own."""
    held = module.__dict__
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return tuple(held[name] for name in names)


def global_hook_dictionaries() -> tuple[dict[int, Any], ...]:
    """The dictionaries of the hooks that run when any module is called."""
    return _global_pre_hooks, _global_hooks


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass that holds other tensors (DTensor, AsyncCollectiveTensor, ...)."""
    return type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor)


def is_wrapper_type(kind: Any) -> bool:
    """Whether operators on this type of tensor run its own code first, which then calls the operators that compute."""
    if kind is torch.Tensor or issubclass(kind, (torch.nn.Parameter, FakeTensor)):
        return False
    return getattr(kind, "__torch_dispatch__", _disabled_dispatch) is not _disabled_dispatch
