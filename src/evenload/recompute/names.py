"""What operators are called while a layer runs: the module they run in, and the call as it stands in Python.

`evenload.plan.operators` names an operator by module path, Python name and aten name. The path comes from hooks on the
layer's modules, the Python name from a function mode, which sees `F.silu(x)` and `x + y` as the user wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from evenload.recompute.layers import modules

Seen = Callable[[str, int, str, Any], None]
"""Told of what goes into and comes out of a module: (path, call, "in" or "out", arguments or results)."""


class CallNames(TorchFunctionMode):
    """Knows the Python name of the outermost torch call in progress."""

    def __init__(self) -> None:
        super().__init__()
        self._stack: list[str] = []
        self.read_data = False
        """Some call took a number out of a tensor, on which the code that followed may depend."""

    @property
    def current(self) -> str:
        """Name of the call in progress; empty outside of one."""
        return self._stack[-1] if self._stack else ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name: str = getattr(func, "__name__", "").partition(".")[0]  # `silu` of the overload `silu.default`
        if name in _READS:
            self.read_data = True
        self._stack.append(name)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._stack.pop()


_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__", "data_ptr"})
"""Calls that take data out of tensors below the dispatcher, where a dispatch mode does not see them."""


class ModulePath:
    """The module that runs now, as a path below the layer."""

    def __init__(self) -> None:
        self._stack: list[str] = []

    @property
    def current(self) -> str:
        """Path of the module; empty for the layer itself."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def follow(self, layer: torch.nn.Module, seen: Seen) -> Generator[None]:
        """Watch the modules inside a layer.

        Args:
            layer: the layer.
            seen: told of the tensors that enter and leave its modules.
        """
        calls: dict[str, int] = {}
        with ExitStack() as handles:
            for path, module in modules(layer):
                for handle in self._hooks(path, module, seen, calls):
                    handles.callback(handle.remove)
            yield

    def _hooks(self, path: str, module: torch.nn.Module, seen: Seen, calls: dict[str, int]) -> Iterator[Any]:
        def enter(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append(path)
            calls[path] = calls.get(path, -1) + 1
            seen(path, calls[path], "in", (args, kwargs))

        def leave(_module: torch.nn.Module, _args: Any, result: Any) -> None:
            if self._stack:
                self._stack.pop()
            seen(path, calls.get(path, 0), "out", result)

        # first, because other hooks (tensor parallelism) run operators that belong to the module
        yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        yield module.register_forward_hook(leave, always_call=True)
