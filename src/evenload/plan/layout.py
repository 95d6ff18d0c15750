"""Which layer sits in which chunk of which stage, and the offset algebra over it.

A table is indexed `[chunk][stage]`, as MindFormers prints it: layers run through all stages of chunk 0, then through
all stages of chunk 1, and so on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from evenload.errors import EvenloadError

Table = tuple[tuple[int, ...], ...]
"""Counts indexed [chunk][stage]."""


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
        if not self.table or not self.table[0]:
            raise EvenloadError("a layout needs at least one chunk and one stage", where="$.table")
        for chunk, row in enumerate(self.table):
            if len(row) != self.pp:
                raise EvenloadError(
                    f"row {chunk} has {len(row)} stages, row 0 has {self.pp}",
                    where=f"$.table[{chunk}]",
                    fix="give every chunk one entry per stage",
                )
            for stage, count in enumerate(row):
                if count < 0:
                    raise EvenloadError(
                        f"stage {stage} of chunk {chunk} would hold {count} layers",
                        where=f"$.table[{chunk}][{stage}]",
                        fix="layer counts cannot be negative",
                    )

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
        if not 0 <= layer < self.num_layers:
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

    @classmethod
    def even(cls, num_layers: int, *, pp: int, interleave: int = 1) -> Layout:
        """As even as whole layers allow; the remainder goes to the middle chunks, away from embedding and head."""
        chunks = pp * interleave
        base, extra = divmod(num_layers, chunks)
        first = (chunks - extra) // 2
        flat = [base + (first <= index < first + extra) for index in range(chunks)]
        return cls(tuple(tuple(flat[chunk * pp : (chunk + 1) * pp]) for chunk in range(interleave)))

    @classmethod
    def from_offset(
        cls, num_layers: int, *, pp: int, interleave: int = 1, offset: int | Sequence[int] | Sequence[Sequence[int]] = 0
    ) -> Layout:
        """Layout from MindFormers' `offset` (int, one entry a stage, or [chunk][stage]).

        `layers = num_layers // (pp * interleave) + offset`, source: MindFormers, "Offset and recompute" (r1.5).

        Raises:
            EvenloadError: wrong shape, wrong sum, or a chunk below zero layers.
        """
        from evenload.plan.offset import read_offset  # noqa: PLC0415  # the reader checks, the value stays small

        return cls(read_offset(num_layers, pp=pp, interleave=interleave, offset=offset))
