"""Functions of the user's that are named on the command line: `package.module:function`."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from evenload.errors import EvenloadError, did_you_mean, shown
from evenload.record.frames import is_library

_SHAPE: Final = re.compile(r"(\d{1,9}(?:x\d{1,9})*)(?::(\w+))?")
_SHORT: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def load_function(name: str) -> Callable[..., Any]:
    """The function that `package.module:function` names, looked for from the current directory too.

    Raises:
        EvenloadError: there is no such module or function, or the module fails when it is imported.
    """
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        own = module_name == missing or module_name.startswith(f"{missing}.")
        raise EvenloadError(
            f"there is no module {missing!r}" if own else f"{module_name} imports {missing!r}, which is not there",
            where=name,
            fix="run this where it can be imported, or install it",
        ) from error
    except Exception as error:  # whatever the user's module raises
        lines = str(error).strip().splitlines() or ["no message"]
        raise EvenloadError(
            f"importing {module_name} raised {type(error).__name__}: {lines[0]}",
            where=_place(error) or name,
            fix=f"run python -c 'import {module_name}' to see all of it",
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise EvenloadError(
            f"{module_name} has no {function_name!r}", where=name, fix=did_you_mean(function_name, dir(module))
        )
    if not callable(function):
        raise EvenloadError(
            f"{name} is a {type(function).__name__}, not a function",
            where=name,
            fix="name a function, such as one that returns it",
        )
    return function


def shaped(texts: Sequence[str], *, where: str) -> Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]:
    """A function that makes a tensor, or a tuple of several, of the given shapes: `8x3x224x224` or `4x512:int64`.

    Raises:
        EvenloadError: a text is no shape.
    """
    parsed: list[tuple[tuple[int, ...], torch.dtype]] = []
    for text in texts:
        found = _SHAPE.fullmatch(text.strip())
        if found is None:
            raise EvenloadError(f"{shown(text)} is no shape", where=where, fix="write 8x3x224x224, or 4x512:int64")
        parsed.append((tuple(map(int, found[1].split("x"))), find_dtype(found[2], where) or torch.float32))

    def made() -> torch.Tensor | tuple[torch.Tensor, ...]:
        tensors = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in parsed)
        return tensors[0] if len(tensors) == 1 else tensors

    return made


def find_dtype(name: str | None, where: str) -> torch.dtype | None:
    """A type of PyTorch by its name or a short one; None for none.

    Raises:
        EvenloadError: there is no such type.
    """
    if name is None:
        return None
    found = getattr(torch, _SHORT.get(name.lower(), name.lower()), None)
    if not isinstance(found, torch.dtype):
        raise EvenloadError(f"{shown(name)} is no type of tensors", where=where, fix="use bf16, fp16, float32, int64")
    return found


def _place(error: BaseException) -> str | None:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None
