"""Allocator settings with what is wrong with them: as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenload.errors import Notice
from evenload.ledger.settings import AllocConf


def as_json(confs: Sequence[AllocConf], notices: Sequence[Notice]) -> dict[str, Any]:
    """Every variable that is set, and everything that is wrong."""
    return {
        "variables": [
            {"variable": conf.variable, "settings": conf.settings, "accepted": conf.accepted} for conf in confs
        ],
        "warnings": notices,
    }


def as_text(confs: Sequence[AllocConf], notices: Sequence[Notice]) -> str:
    """The settings for the screen."""
    lines: list[str] = []
    for conf in confs:
        lines.append(conf.variable + ("" if conf.accepted else " (the allocator stops at it)"))
        lines += [f"  {key}: {value}" for key, value in conf.settings.items()] or ["  nothing is set"]
    if not confs:
        lines.append("no allocator settings")
    lines += ["", *(f"warning: {notice}" for notice in notices)] if notices else ["", "nothing is wrong with them"]
    return "\n".join(lines)
