"""The layout string of Megatron-LM's `--pipeline-model-parallel-layout`.

`|` separates chunks, in layer order: all stages of the first chunk, then all stages of the second. `E` is the
embedding, `t` a transformer layer, `m` a multi-token-prediction layer, `L` the loss. `x*n` repeats a letter, `(...)*n`
a group, commas are for the eye. Source: Megatron-LM, "Custom Pipeline Model Parallel Layout".
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Final

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout

_LETTERS: Final = {"E": "the embedding", "t": "a layer", "m": "an MTP layer", "L": "the loss"}
_GROUP: Final = re.compile(r"\(([^()]+)\)\*(\d{1,6})")
_REPEAT: Final = re.compile(r"([EtmL|])\*(\d{1,6})")
_LONGEST: Final = 200_000


def read_layout_string(text: str, *, pp: int, where: str | None = None) -> tuple[Layout, int]:
    """The layout and the number of MTP layers that a layout string describes.

    Raises:
        EvenloadError: an unknown letter, unbalanced brackets, chunks that do not divide over the stages, or the
            embedding or the loss not exactly once at its end.

    Examples:
        >>> read_layout_string("Et*3|(tt|)*2,m|L", pp=5)[0].table
        ((3, 2, 2, 0, 0),)
    """
    rows = _expanded(text, where).split("|")
    for row in rows:
        for letter in row:
            if letter not in _LETTERS:
                raise EvenloadError(
                    f"the layout {text!r} holds {letter!r}",
                    where=where,
                    fix=f"use {', '.join(f'{key} for {name}' for key, name in _LETTERS.items())}, | between chunks",
                )
    if len(rows) % pp:
        raise EvenloadError(
            f"the layout {text!r} has {len(rows)} chunks, which {pp} stages cannot share",
            where=where,
            fix=f"give a multiple of {pp} chunks",
        )
    flat = "".join(rows)
    for letter, place in (("E", 0), ("L", -1)):
        if flat.count(letter) != 1 or flat[place] != letter:
            end = "begin" if letter == "E" else "end"
            raise EvenloadError(f"the layout {text!r} must {end} with {letter}, once", where=where)
    if "t" in flat[flat.find("m") :] and "m" in flat:
        raise EvenloadError(
            f"the layout {text!r} has layers after the MTP layers", where=where, fix="put m after all t"
        )
    counts = [row.count("t") for row in rows]
    table = tuple(tuple(counts[start : start + pp]) for start in range(0, len(counts), pp))
    return Layout(table), flat.count("m")


def write_layout_string(layout: Layout, *, mtp: int = 0) -> str:
    """The layout string of a layout, with the MTP layers before the loss; runs of equal chunks are written once.

    Examples:
        >>> write_layout_string(Layout(((3, 2, 2, 2, 1),)))
        'Et*3|(tt|)*3tL'
    """
    flat = [count for row in layout.table for count in row]
    chunks = [_run("t", count) for count in flat]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += _run("m", mtp) + "L"
    pieces: list[str] = []
    for chunk, run in groupby(chunks[:-1]):
        times = len(list(run))
        pieces.append(f"({chunk}|)*{times}" if times > 2 and chunk else f"{chunk}|" * times)
    return "".join(pieces) + chunks[-1]


def _run(letter: str, count: int) -> str:
    return letter * count if count <= 2 else f"{letter}*{count}"


def _expanded(text: str, where: str | None) -> str:
    """The string with every repetition written out."""
    plain = text.replace(",", "").replace(" ", "")
    for pattern in (_GROUP, _REPEAT):
        size = len(plain) + sum(len(match[1]) * int(match[2]) for match in pattern.finditer(plain))
        if size > _LONGEST:
            raise EvenloadError(f"the layout {text[:60]!r} describes more layers than any model has", where=where)
        plain = pattern.sub(lambda match: match[1] * int(match[2]), plain)
    if "(" in plain or ")" in plain or "*" in plain:
        raise EvenloadError(
            f"the layout {text!r} has a bracket or a * that belongs to nothing",
            where=where,
            fix="write (tt|)*3 to repeat a group and t*3 to repeat a letter; groups are not nested",
        )
    return plain
