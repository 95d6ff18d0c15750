"""Values as YAML text: the few forms that the writers use, safe for any text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

_PLAIN: Final = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*")
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


def scalar(value: bool | float | str | None) -> str:
    r"""One value on one line; text is quoted where YAML would read something else.

    Examples:
        >>> scalar(True), scalar("mlp"), scalar("on"), scalar(r"mlp\.mul")
        ('true', 'mlp', "'on'", "'mlp\\.mul'")
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return quoted(value)


def quoted(text: str) -> str:
    """Text in single quotes; in double quotes with escapes where it holds what single quotes cannot."""
    if all(" " <= char <= "~" for char in text):
        return "'" + text.replace("'", "''") + "'"
    return '"' + "".join(_escaped(char) for char in text) + '"'


def flow(value: Any, words: tuple[str, str] = ("false", "true")) -> str:
    """Nested lists and mappings in brackets, on one line: `[[1, 2], {a: 3}]`; `words` are false and true."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(item, words) for item in cast("list[Any]", value)) + "]"
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value)
        return "{" + ", ".join(f"{scalar(key)}: {flow(item, words)}" for key, item in entries.items()) + "}"
    return words[value] if isinstance(value, bool) else scalar(value)


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if " " <= char <= "~":
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
