"""Which layer sits in which chunk of which stage, and the offset algebra over it.

A table is indexed `[chunk][stage]`, as MindFormers prints it: layers run through all stages of chunk 0, then through
all stages of chunk 1, and so on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from evenload.errors import EvenloadError, Notice
from evenload.plan.checks import listed, shown, whole
from evenload.plan.offset import OffsetLike, Table, even_table, read_offset

__all__ = ["Layout", "Table"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How many layers every chunk of every stage holds.

    Examples:
        >>> Layout(((4, 5), (5, 4))).stages_of_layers()[:6]
        (0, 0, 0, 0, 1, 1)
        >>> Layout.from_offset(9, pp=2, interleave=2, offset=((0, 1), (0, 0))).table
        ((2, 3), (2, 2))
        >>> Layout(((2, 3), (2, 2))).offsets()
        ((0, 1), (0, 0))
    """

    table: Table
    """Layers of [chunk][stage]; every row has one entry a stage."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", _checked(self.table))  # lists are welcome; none of the caller's is kept

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.table[0])

    @property
    def interleave(self) -> int:
        """Chunks per stage."""
        return len(self.table)

    @property
    def num_layers(self) -> int:
        """Layers in all chunks together."""
        return sum(map(sum, self.table))

    @property
    def per_stage(self) -> tuple[int, ...]:
        """Layers of every stage over all its chunks."""
        return tuple(map(sum, zip(*self.table, strict=True)))

    @property
    def accumulated(self) -> Table:
        """Running sum of the table in layer order."""
        sums = list(accumulate(count for row in self.table for count in row))
        return tuple(tuple(sums[chunk * self.pp : (chunk + 1) * self.pp]) for chunk in range(self.interleave))

    def chunks(self) -> Iterator[tuple[int, int, range]]:
        """(chunk, stage, its layers), in layer order; empty chunks included."""
        start = 0
        for chunk, row in enumerate(self.table):
            for stage, count in enumerate(row):
                yield chunk, stage, range(start, start + count)
                start += count

    def layers(self, chunk: int, stage: int) -> range:
        """Layers of one chunk of one stage."""
        end = self.accumulated[chunk][stage]
        return range(end - self.table[chunk][stage], end)

    def place(self, layer: int) -> tuple[int, int]:
        """(chunk, stage) of a layer.

        Raises:
            EvenloadError: no such layer.
        """
        if not 0 <= whole(layer, "$.layer") < self.num_layers:
            raise EvenloadError(f"there is no layer {layer}: the layout holds layers 0 to {self.num_layers - 1}")
        flat = [count for row in self.accumulated for count in row]
        return divmod(bisect_right(flat, layer), self.pp)

    def stages_of_layers(self) -> tuple[int, ...]:
        """Stage of every layer (MindFormers: pipeline id list)."""
        return tuple(stage for _, stage, layers in self.chunks() for _ in layers)

    def chunks_of_layers(self) -> tuple[int, ...]:
        """Chunk of every layer (MindFormers: interleave id list)."""
        return tuple(chunk for chunk, _, layers in self.chunks() for _ in layers)

    def offsets(self) -> Table:
        """The offset that gives this layout: each count minus `num_layers // (pp * interleave)`."""
        base = self.num_layers // (self.pp * self.interleave)
        return tuple(tuple(count - base for count in row) for row in self.table)

    def notices(self, where: str = "$.offset") -> tuple[Notice, ...]:
        """What a reader of the layout should know: chunks that hold no layer. `where` is the place that says so."""
        empty = [(chunk, stage) for chunk, stage, layers in self.chunks() if not layers]
        if not empty:
            return ()
        chunk, stage = empty[0]
        return (Notice(fact=f"stage {stage} of chunk {chunk} holds no layer" + _and_more(len(empty) - 1), where=where),)

    def __str__(self) -> str:
        rows = " | ".join(" ".join(map(str, row)) for row in self.table)
        chunks = f" x {self.interleave} interleaves" if self.interleave > 1 else ""
        return f"{self.num_layers} layers on {self.pp} stages{chunks}: {rows}"

    @classmethod
    def even(cls, num_layers: int, *, pp: int, interleave: int = 1) -> Layout:
        """As even as whole layers allow; the remainder goes to the middle chunks, away from embedding and head."""
        return cls(
            even_table(
                whole(num_layers, "$.num_layers", least=1),
                whole(pp, "$.pp", least=1),
                whole(interleave, "$.interleave", least=1),
            )
        )

    @classmethod
    def from_offset(cls, num_layers: int, *, pp: int, interleave: int = 1, offset: OffsetLike = 0) -> Layout:
        """Layout from MindFormers' `offset` (int, one entry a stage, or [chunk][stage]).

        `layers = num_layers // (pp * interleave) + offset`, source: MindFormers, "Offset and recompute" (r1.5).

        Raises:
            EvenloadError: wrong shape, wrong sum, or a chunk below zero layers.
        """
        return cls(read_offset(num_layers, pp=pp, interleave=interleave, offset=offset))

    @classmethod
    def from_counts(cls, counts: Sequence[int] | Sequence[Sequence[int]]) -> Layout:
        """Layout from layers per stage (one chunk each) or per [chunk][stage].

        Examples:
            >>> Layout.from_counts([16, 16, 16, 13]).offsets()
            ((1, 1, 1, -2),)

        Raises:
            EvenloadError: no counts, rows of different length, or a count that is no whole number of at least zero.
        """
        nested = listed(counts) and any(listed(entry) for entry in counts)
        return cls(cast("Table", counts if nested else (counts,)))

    @classmethod
    def from_stages(cls, stages: Sequence[int], *, pp: int) -> Layout:
        """Layout from the stage of every layer: a new chunk begins wherever the stages start over.

        Examples:
            >>> Layout.from_stages([0, 0, 1, 0, 1, 1], pp=2).table
            ((2, 1), (1, 2))

        Raises:
            EvenloadError: no layers, or a stage that does not exist.
        """
        pp = whole(pp, "$.pp", least=1)
        table: list[list[int]] = [[0] * pp]
        before = 0
        for layer, value in enumerate(stages):
            stage = whole(value, f"$.stages[{layer}]", least=0)
            if stage >= pp:
                raise EvenloadError(f"there is no stage {stage} of {pp}", where=f"$.stages[{layer}]")
            if stage < before:
                table.append([0] * pp)
            table[-1][stage] += 1
            before = stage
        return cls(tuple(map(tuple, table)))


def _checked(table: Any) -> Table:
    if not listed(table):
        raise EvenloadError(
            f"{shown(table)} is no table of layer counts", where="$.table", fix="give one row per chunk"
        )
    rows: list[tuple[int, ...]] = []
    for chunk, row in enumerate(table):
        where = f"$.table[{chunk}]"
        if not listed(row):
            raise EvenloadError(f"{shown(row)} is no row of layer counts", where=where, fix="give one entry per stage")
        rows.append(tuple(whole(count, f"{where}[{stage}]", least=0) for stage, count in enumerate(row)))
        if len(row) != len(rows[0]):
            raise EvenloadError(
                f"row {chunk} has {len(row)} stages, row 0 has {len(rows[0])}",
                where=where,
                fix="give every chunk one entry per stage",
            )
    if not rows or not rows[0]:
        raise EvenloadError("a layout needs at least one chunk and one stage", where="$.table")
    return tuple(rows)


def _and_more(others: int) -> str:
    return f" (and {others} more)" if others else ""
