"""Python lines of a snapshot: the user's own, and what PyTorch's tell about the phase."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from evenload.ledger.plain_pickle import as_dict, as_list
from evenload.ledger.words import Phase

_FRAMEWORK: Final = re.compile(
    r"(?:^|[/\\])(?:torch|torch_npu|runpy\.py|threading\.py|importlib)(?:[/\\]|$)|<frozen|<string>$"
)
_PHASES: Final = (
    (
        Phase.RECOMPUTE,
        re.compile(r"torch[/\\]utils[/\\]checkpoint\.py$"),
        re.compile("recompute_fn|unpack_hook|backward"),
    ),
    (Phase.OPTIMIZER, re.compile(r"torch[/\\]optim[/\\]"), re.compile("")),
    (
        Phase.BACKWARD,
        re.compile(r"torch[/\\](?:autograd[/\\](?:graph|__init__)|_tensor)\.py$"),
        re.compile("_engine_run_backward|backward|grad$"),
    ),
    (
        Phase.FORWARD,
        re.compile(r"torch[/\\]nn[/\\]modules[/\\]module\.py$"),
        re.compile("_call_impl|_wrapped_call_impl"),
    ),
)
"""Phase, file of PyTorch, name of its function; the first that is found on the stack counts."""
_BUILDING: Final = re.compile(r"torch[/\\]nn[/\\](?:modules[/\\]module|parameter)\.py$")
_BUILDERS: Final = frozenset({"_apply", "convert", "to", "cuda", "to_empty", "__new__"})


class Frames:
    """Stacks of a snapshot, each kept once."""

    def __init__(self) -> None:
        self.known = False
        """Whether any event has Python lines."""
        self._stacks: list[tuple[tuple[str, int, str], ...]] = []
        self._positions: dict[tuple[tuple[str, int, str], ...], int] = {}
        self._phase: dict[int, Phase] = {}

    def stack(self, frames: object) -> int:
        """Position of a stack, given innermost first; -1: it has no Python line."""
        lines = tuple(line for frame in as_list(frames) or () if (line := _python(as_dict(frame))) is not None)
        if not lines:
            return -1
        self.known = True
        position = self._positions.setdefault(lines, len(self._stacks))
        if position == len(self._stacks):
            self._stacks.append(lines)
        return position

    def phase(self, position: int) -> Phase:
        """What PyTorch was doing; a stack without Python lines is known only beside others."""
        if position < 0:
            return Phase.OTHER
        if position not in self._phase:
            self._phase[position] = self._find_phase(position)
        return self._phase[position]

    def building(self, position: int) -> bool:
        """Whether a module's parameters were being made or moved."""
        if position < 0:
            return False
        return any(_BUILDING.search(file) and name in _BUILDERS for file, _, name in self._stacks[position])

    def lines(self, position: int) -> list[str]:
        """The user's lines, innermost first; where there are none, all."""
        if position < 0:
            return []
        stack = self._stacks[position]
        own = [frame for frame in stack if not _FRAMEWORK.search(frame[0])]
        return [f"{file}:{line} {name}" for file, line, name in own or stack]

    def operator(self, position: int) -> str | None:
        """The innermost function, where it is PyTorch's."""
        if position < 0:
            return None
        file, _, name = self._stacks[position][0]
        return name if _FRAMEWORK.search(file) and not name.startswith("<") else None

    def _find_phase(self, position: int) -> Phase:
        stack = self._stacks[position]
        for phase, in_file, in_name in _PHASES:
            if any(in_file.search(file) and in_name.search(name) for file, _, name in stack):
                return phase
        return Phase.OTHER


def _python(frame: Mapping[str, Any] | None) -> tuple[str, int, str] | None:
    """File, line and function of a Python frame; None for C++."""
    if frame is None:
        return None
    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    if not isinstance(file, str) or type(line) is not int or not isinstance(name, str):
        return None
    if not -1 <= line < 2**31:
        return None
    if not file or file == "??" or not (file.endswith(".py") or file.startswith("<")):
        return None
    return file, line, name
