"""Recording of real and dry runs. The room is callable: `evenload.record(...)` makes a recording."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from evenload.errors import EvenloadError


def require_torch() -> None:
    """Make sure that PyTorch can be imported.

    Raises:
        EvenloadError: it is not installed.
    """
    if find_spec("torch") is None:
        raise EvenloadError("recording needs PyTorch, which is not installed", fix="pip install 'evenload[torch]'")


class _Room(ModuleType):
    """A module that can be called: its name is the verb."""

    def __call__(self, **options: Any) -> Any:
        require_torch()
        from evenload.record.recorder import record  # noqa: PLC0415  # imports torch

        return record(**options)


sys.modules[__name__].__class__ = _Room
