"""Recording of real and dry runs. The room is callable: `evenload.record(...)` makes a recording."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A module that can be called: its name is the verb."""

    def __call__(self, **options: Any) -> Any:
        from evenload.record.recorder import record  # noqa: PLC0415  # imports torch

        return record(**options)


sys.modules[__name__].__class__ = _Room
