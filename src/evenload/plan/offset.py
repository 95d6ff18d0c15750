"""MindFormers' `offset`: what every chunk holds above or below the even share.

`layers[chunk][stage] = num_layers // (pp * interleave) + offset[chunk][stage]`, so the offset sums to the remainder of
that division. Source: MindFormers documentation, "Offset and recompute" (r1.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from evenload.errors import EvenloadError, Notice
from evenload.plan.checks import MOST, listed, shown, whole

Table = tuple[tuple[int, ...], ...]
"""Counts indexed [chunk][stage]."""

OffsetLike = int | Sequence[int] | Sequence[Sequence[int]]
"""An offset as people write it: one number, one a stage, or one a chunk and stage."""

_LONGEST_EXAMPLE: Final = 64
"""Entries of the longest offset that an error message spells out."""


def read_offset(num_layers: int, *, pp: int, interleave: int = 1, offset: OffsetLike = 0) -> Table:
    """Layers of [chunk][stage] from an offset; zero layers in a chunk are allowed, fewer are not.

    One number stands for every chunk, one row for every interleave; both are only right where nothing is left over to
    deal out, because they would add it more than once.

    Raises:
        EvenloadError: a size below 1, an entry that is no whole number, a wrong shape, a wrong sum (the message has an
            offset that works), or a chunk below zero layers.

    Examples:
        >>> read_offset(48, pp=5, offset=[0, 1, 1, 1, 0])
        ((9, 10, 10, 10, 9),)
        >>> read_offset(8, pp=2, interleave=2)
        ((2, 2), (2, 2))
    """
    num_layers = whole(num_layers, "$.num_layers", least=1)
    pp, interleave = whole(pp, "$.pp", least=1), whole(interleave, "$.interleave", least=1)
    if pp * interleave > MOST:
        raise EvenloadError(f"{pp} stages x {interleave} chunks is beyond {MOST}", where="$.pp", fix="check the sizes")
    example = _example(num_layers, pp, interleave)
    rows = _rows(offset, pp, interleave, example)
    base = num_layers // (pp * interleave)
    _check_sum(offset, rows, (num_layers, pp, interleave), example)
    for chunk, row in enumerate(rows):
        for stage, entry in enumerate(row):
            if base + entry < 0:
                raise EvenloadError(
                    f"offset {entry} leaves stage {stage} of chunk {chunk} with {base + entry} layers "
                    f"(the even share is {base})",
                    where=f"$.offset[{chunk}][{stage}]" if interleave > 1 else f"$.offset[{stage}]",
                    fix=f"no entry below {-base}; {example}",
                )
    return tuple(tuple(base + entry for entry in row) for row in rows)


def even_table(num_layers: int, pp: int, interleave: int) -> Table:
    """As even as whole layers allow; the remainder goes to the middle chunks, away from embedding and head."""
    chunks = pp * interleave
    base, extra = divmod(num_layers, chunks)
    first = (chunks - extra) // 2
    flat = [base + (first <= place < first + extra) for place in range(chunks)]
    return tuple(tuple(flat[chunk * pp : (chunk + 1) * pp]) for chunk in range(interleave))


def as_mindformers_reads(offset: Any) -> tuple[Any, tuple[Notice, ...]]:
    """The offset with whole numbers where MindFormers makes them of fractions, text and true or false.

    MindFormers turns the offset into an array of int32: 0.9 becomes 0, "1" and true become 1. Here each such entry is
    accepted with a notice. What has no such reading is left as it is, for `read_offset` to refuse.
    """
    notices: list[Notice] = []
    if not listed(offset):
        return _number(offset, "$.offset", notices), tuple(notices)
    read: list[Any] = []
    for chunk, row in enumerate(offset):
        where = f"$.offset[{chunk}]"
        if listed(row):
            read.append([_number(entry, f"{where}[{stage}]", notices) for stage, entry in enumerate(row)])
        else:
            read.append(_number(row, where, notices))
    return read, tuple(notices)


def _rows(offset: Any, pp: int, interleave: int, example: str) -> Table:
    if not listed(offset):
        return ((whole(offset, "$.offset"),) * pp,) * interleave
    if not any(listed(entry) for entry in offset):
        return (_row(offset, pp, "$.offset", example),) * interleave
    if len(offset) != interleave:
        raise EvenloadError(
            f"the offset has {len(offset)} rows for {interleave} interleaves",
            where="$.offset",
            fix=f"give one row per interleave; {example}",
        )
    return tuple(_row(row, pp, f"$.offset[{chunk}]", example) for chunk, row in enumerate(offset))


def _row(row: Any, pp: int, where: str, example: str) -> tuple[int, ...]:
    if not listed(row):
        raise EvenloadError(f"{shown(row)} stands where a row of {pp} numbers should", where=where, fix=example)
    if len(row) != pp:
        raise EvenloadError(
            f"{len(row)} entries for {pp} stages", where=where, fix=f"give one entry per stage; {example}"
        )
    return tuple(whole(entry, f"{where}[{stage}]") for stage, entry in enumerate(row))


def _check_sum(offset: Any, rows: Table, sizes: tuple[int, int, int], example: str) -> None:
    num_layers, pp, interleave = sizes
    chunks, total = pp * interleave, sum(map(sum, rows))
    remainder = num_layers % chunks
    if total == remainder:
        return
    if not listed(offset):
        said = f"offset {offset} changes each of the {chunks} chunks, {total} in all"
    elif interleave > 1 and not listed(offset[0]):
        said = f"the offset is repeated for each of the {interleave} interleaves, {total} in all"
    else:
        said = f"the offset sums to {total}"
    share = f"{num_layers} layers on {pp} stages" + (f" x {interleave} interleaves" if interleave > 1 else "")
    raise EvenloadError(
        f"{said}; {share} leave {remainder} over ({num_layers} mod {chunks}), and the offset must sum to {remainder}",
        where="$.offset",
        fix=example,
    )


def _example(num_layers: int, pp: int, interleave: int) -> str:
    """An offset that works, as advice."""
    base = num_layers // (pp * interleave)
    rows = [[count - base for count in row] for row in even_table(num_layers, pp, interleave)]
    if not any(map(any, rows)):
        return "offset: 0 works"
    if pp * interleave > _LONGEST_EXAMPLE:
        return "let `evenload plan` write the offset"
    return f"offset: {rows if interleave > 1 else rows[0]} works"


def _number(value: Any, where: str, notices: list[Notice]) -> Any:
    if not isinstance(value, bool | float | str):
        return value
    try:
        number = int(value)
    except (ValueError, OverflowError):  # not a number, infinite, or text that is none
        return value
    if not (isinstance(value, float) and value.is_integer()):
        notices.append(Notice(fact=f"{shown(value)} is read as {number}", where=where, fix=f"write {number}"))
    return number
