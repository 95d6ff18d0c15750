"""A plain table for the screen and for files: no colours, no line breaks, numbers to the right."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0, 1)) -> str:
    """Align rows under their head.

    Args:
        head: names of the columns.
        rows: cells; every row as long as the head.
        left: numbers of the columns that are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )
