"""Numbers that code works out while it builds a model, such as the rate of every layer: they follow from no data."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch.utils._pytree import tree_any, tree_map

from evenload.record._torch_private import DispatchMode, FakeTensor, really

_LARGEST: Final = 4096
"""Elements of a tensor whose content is kept; parameters are larger, and their content is chance."""
_ITEM: Final = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001  # the operator's name
_CHANCE: Final = torch.Tag.nondeterministic_seeded


class Constants(DispatchMode):
    """Keeps the content of small fake tensors that follows from the code alone, so that it can be read.

    `[rate.item() for rate in torch.linspace(0, 0.1, 12)]` has an answer without any data; what was drawn by chance or
    left uninitialized has none.
    """

    def __init__(self) -> None:
        DispatchMode.__init__(self)
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id of a fake tensor -> (the fake tensor, which keeps the id its own, and the real one)."""

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and the same on the contents where all of them are known."""
        kwargs = kwargs or {}
        if func is _ITEM and (pair := self._known.get(id(args[0]))) is not None:
            with really():
                return pair[1].item()
        result = func(*args, **kwargs)
        results = _listed(result)
        if self._follows(func, (args, kwargs)) and all(_is_small(one) for one in results):
            contents, named = tree_map(self._content, (args, kwargs))
            with really():
                reals = _listed(func(*contents, **named))
            self._known.update({id(one): (one, real) for one, real in zip(results, reals, strict=True)})
        elif func._schema.is_mutable and args:  # noqa: SLF001  # no public name
            self._forget(args[0])
        return result

    def _follows(self, func: Any, arguments: Any) -> bool:
        """Whether the content of a result follows from contents that are known."""
        if _CHANCE in func.tags or "empty" in func.name():
            return False
        return not tree_any(lambda leaf: isinstance(leaf, FakeTensor) and id(leaf) not in self._known, arguments)

    def _content(self, leaf: object) -> object:
        return self._known[id(leaf)][1] if isinstance(leaf, FakeTensor) else leaf

    def _forget(self, written: object) -> None:
        """What is written to is no longer known, nor are its views."""
        if (pair := self._known.get(id(written))) is None:
            return
        place = pair[1].untyped_storage().data_ptr()
        for key in [key for key, (_, real) in self._known.items() if real.untyped_storage().data_ptr() == place]:
            del self._known[key]


def _listed(result: object) -> list[Any]:
    return list(cast("tuple[Any, ...]", result)) if isinstance(result, tuple | list) else [result]


def _is_small(result: object) -> bool:
    return isinstance(result, FakeTensor) and result.numel() <= _LARGEST
