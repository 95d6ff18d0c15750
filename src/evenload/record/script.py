"""Runs a script as Python would, under a recording."""

from __future__ import annotations

import builtins
import importlib.util
import io
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, cast

from evenload.errors import EvenloadError
from evenload.record.recorder import Recorder


def run_script(recorder: Recorder, target: str, arguments: Sequence[str], *, module: bool = False) -> int:
    """Run a script under a recording; what it prints, how it fails and its exit code are its own.

    The script becomes `__main__` and stays it, so that what it leaves behind is still there when the recording looks.

    Args:
        recorder: a recording that has not been used.
        target: path of the script, or name of a module.
        arguments: `sys.argv` after the first.
        module: run a module, as `python -m` does.

    Returns:
        The script's exit code.

    Raises:
        EvenloadError: there is no such script or module.
    """
    main, load = _module(target) if module else _script(target)
    sys.argv = [str(main.__file__) if module else target, *arguments]
    sys.path[0] = str(Path.cwd() if module else Path(target).resolve().parent)
    sys.modules["__main__"] = main
    with recorder:
        error = _run(load, main)
        if error is not None:
            recorder.ended_by(error)
    return 0 if error is None else _end(error)


def _run(load: Callable[[], CodeType], main: ModuleType) -> BaseException | None:
    try:
        exec(load(), main.__dict__)  # noqa: S102  # this is what running a script is
    except BaseException as error:  # noqa: BLE001  # whatever ends a script is shown as Python shows it
        return error.with_traceback(_its_own(error.__traceback__))
    return None


def _end(error: BaseException) -> int:
    """Show what ended the script, and its exit code, as Python would."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _script(path: str) -> tuple[ModuleType, Callable[[], CodeType]]:
    """The module that a script becomes, and how to compile it: its syntax errors are its own."""
    file = Path(path)
    if not file.is_file():
        what = "this is a directory, not a script" if file.is_dir() else "there is no such script"
        raise EvenloadError(what, where=path, fix="name a Python file, or a module with -m")
    try:
        with io.open_code(str(file.resolve())) as opened:
            source = opened.read()
    except OSError as error:
        raise EvenloadError(
            f"cannot read the script: {(error.strerror or str(error)).lower()}",
            where=path,
            fix="check that it may be read",
        ) from None
    whole = str(file.absolute())
    return _main(file=whole, spec=None), lambda: compile(source, whole, "exec")


def _module(name: str) -> tuple[ModuleType, Callable[[], CodeType]]:
    """The module that `python -m name` would run as `__main__`."""
    sys.path.insert(1, str(Path.cwd()))  # where `python -m` looks first
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:  # a package
        spec = _find(f"{name}.__main__")
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise EvenloadError(
            f"there is no module {name!r} that can be run", fix="name a module, or a package with a __main__.py"
        )
    found = spec
    return _main(file=str(found.origin), spec=found), lambda: cast("Any", found.loader).get_code(found.name)


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _main(*, file: str, spec: ModuleSpec | None) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=builtins, __spec__=spec, __cached__=None)
    if spec is not None:
        main.__dict__.update(__package__=spec.parent, __loader__=spec.loader)
    return main


def _its_own(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this module."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback
