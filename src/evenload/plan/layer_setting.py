"""MindFormers' `LayerSetting`: a thin view over `Layout` and `Policy` with the names that its users know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from evenload.errors import Notice
from evenload.plan.checks import flag, plain, whole
from evenload.plan.layout import Layout, Table
from evenload.plan.mindformers_differences import after_drops, differences
from evenload.plan.offset import as_mindformers_reads, read_offset
from evenload.plan.policy import Policy
from evenload.plan.recompute_lists import Switched, read_recompute_lists

Counts = list[list[int]]
"""Layers of [interleave][stage]."""
_EMPTY_CHUNKS: Final = "MindFormers before 1.7 accepts this; later versions only at the first and the last chunk"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerView:
    """What happens to one layer."""

    layer: int
    stage: int
    chunk: int
    full: bool
    """The whole layer is recomputed."""
    select: list[str]
    """Patterns in force whose operators are recomputed; none on a fully recomputed layer."""
    comm: list[str]
    """Patterns in force whose collectives are run again."""
    select_exclude: list[str]
    """Patterns whose operators stay kept."""
    comm_exclude: list[str]
    """Patterns whose collective results stay kept."""


class LayerSetting:
    r"""Which stage holds which layer, and what is recomputed there.

    The tables are the ones that MindFormers logs for the same settings, exclude lists included: there, an exclude takes
    a pattern off every layer. What evenload does is `policy` and `for_layer`, where an exclude acts on the layers it
    names; `notices` says when the two differ.

    Examples:
        >>> setting = LayerSetting(num_layers=9, pp=2, offset=[1, 0], recompute=[2, 0], select_recompute=[3, 1])
        >>> setting.layer_list, setting.layer_recompute
        ([[5, 4]], [[2, 0]])
        >>> setting.for_layer(2).select
        ['feed_forward\\.mul', 'feed_forward\\.w1\\.activation\\.silu']
    """

    __slots__ = ("_lists", "layout", "notices", "policy")

    layout: Layout
    policy: Policy
    notices: tuple[Notice, ...]

    def __init__(
        self,
        num_layers: int,
        *,
        pp: int,
        pp_interleave_num: int = 1,
        offset: Any = 0,
        recompute: Any = False,
        select_recompute: Any = False,
        select_comm_recompute: Any = False,
        select_recompute_exclude: Any = False,
        select_comm_recompute_exclude: Any = False,
        parallel_optimizer_comm_recompute: bool = False,
        mp_comm_recompute: bool = True,
        recompute_slice_activation: bool = False,
        swap: bool = False,
    ) -> None:
        """Read the settings; nothing of the caller's is changed or kept.

        Args:
            num_layers: layers of the model.
            pp: `pipeline_stage`.
            pp_interleave_num: chunks per stage. MindFormers takes 1 unless `pipeline_interleave` is on.
            offset: one number, one per stage, or one per [interleave][stage].
            recompute: layers recomputed as a whole; see `read_recompute_lists` for this and the next four.
            select_recompute: operators that are recomputed.
            select_comm_recompute: collectives that are run again.
            select_recompute_exclude: operators to leave out.
            select_comm_recompute_exclude: collectives to leave out.
            parallel_optimizer_comm_recompute: gather sharded parameters again in backward.
            mp_comm_recompute: full recompute runs tensor-parallel collectives again.
            recompute_slice_activation: full recompute keeps a slice of the layer input.
            swap: `swap_config` is on: the numbers of the recompute lists are layers, not counts.

        Raises:
            EvenloadError: the settings mean nothing; the message says how to mend them.
        """
        interleave = whole(pp_interleave_num, "$.pp_interleave_num", least=1)
        numbers, read_as = as_mindformers_reads(plain(offset))
        self.layout = Layout(read_offset(num_layers, pp=pp, interleave=interleave, offset=numbers))
        self._lists = read_recompute_lists(
            self.layout,
            recompute=plain(recompute),
            select_recompute=plain(select_recompute),
            select_comm_recompute=plain(select_comm_recompute),
            select_recompute_exclude=plain(select_recompute_exclude),
            select_comm_recompute_exclude=plain(select_comm_recompute_exclude),
            layer_ids=flag(swap, "$.swap"),
        )
        self.policy = self._lists.policy(
            optimizer_comm=flag(parallel_optimizer_comm_recompute, "$.parallel_optimizer_comm_recompute"),
            mp_comm=flag(mp_comm_recompute, "$.mp_comm_recompute"),
            slice_activation=flag(recompute_slice_activation, "$.recompute_slice_activation"),
        )
        self.notices = (
            *read_as,
            *(replace(notice, fix=_EMPTY_CHUNKS) for notice in self.layout.notices()),
            *self._lists.notices,
            *differences(self._lists, swap=swap, slices_lists=recompute_slice_activation and recompute is not True),
        )

    @property
    def layer_list(self) -> Counts:
        """Layers of [interleave][stage]."""
        return _plain(self.layout.table)

    @property
    def layer_accu(self) -> Counts:
        """Running sum of `layer_list`, interleave by interleave."""
        return _plain(self.layout.accumulated)

    @property
    def pp_ids(self) -> list[int]:
        """Stage of every layer."""
        return list(self.layout.stages_of_layers())

    @property
    def interleave_ids(self) -> list[int]:
        """Interleave of every layer."""
        return list(self.layout.chunks_of_layers())

    @property
    def layer_recompute(self) -> Counts:
        """Fully recomputed layers of [interleave][stage]: the first so many."""
        return _plain(self._lists.full.table)

    @property
    def select_recompute(self) -> dict[str, Counts]:
        """Pattern -> layers of [interleave][stage], without the patterns that MindFormers drops for an exclude."""
        return _tables(after_drops(self._lists.select, self._lists.select_exclude))

    @property
    def select_comm_recompute(self) -> dict[str, Counts]:
        """As `select_recompute`, for collectives."""
        return _tables(after_drops(self._lists.comm, self._lists.comm_exclude))

    @property
    def select_recompute_exclude(self) -> dict[str, Counts]:
        """Pattern -> layers of [interleave][stage] on which its operators stay kept."""
        return _tables(self._lists.select_exclude)

    @property
    def select_comm_recompute_exclude(self) -> dict[str, Counts]:
        """As `select_recompute_exclude`, for collectives."""
        return _tables(self._lists.comm_exclude)

    def for_layer(self, layer: int) -> LayerView:
        """What happens to one layer.

        Raises:
            EvenloadError: no such layer.
        """
        chunk, stage = self.layout.place(layer)
        policy = self.policy.for_layer(layer)
        return LayerView(
            layer=layer,
            stage=stage,
            chunk=chunk,
            full=policy.full,
            select=list(policy.select),
            comm=list(policy.comm),
            select_exclude=list(policy.select_exclude),
            comm_exclude=list(policy.comm_exclude),
        )

    def log_lines(self) -> list[str]:
        """The lines that MindFormers' documentation shows for the settings; exclude lists only where some are given."""
        lines = [
            f"num_layers per stage: {self.layer_list}",
            f"Accumulated num_layers per stage: {self.layer_accu}",
            f"Pipeline id list: {self.pp_ids}",
            f"Interleave id list: {self.interleave_ids}",
            f"Formative layer_recompute: {self.layer_recompute}",
            f"Formative select_recompute: {_shown(self.select_recompute)}",
            f"Formative select_comm_recompute: {_shown(self.select_comm_recompute)}",
        ]
        if self._lists.select_exclude:
            lines.append(f"Formative select_recompute_exclude: {_shown(self.select_recompute_exclude)}")
        if self._lists.comm_exclude:
            lines.append(f"Formative select_comm_recompute_exclude: {_shown(self.select_comm_recompute_exclude)}")
        return [f"INFO - {line}" for line in lines]

    def __str__(self) -> str:
        return "\n".join(self.log_lines())


def _tables(patterns: Mapping[str, Switched]) -> dict[str, Counts]:
    return {pattern: _plain(switched.table) for pattern, switched in patterns.items()}


def _plain(table: Table) -> Counts:
    return [list(row) for row in table]


def _shown(tables: Mapping[str, Counts]) -> str:
    """As MindFormers' documentation shows a mapping: patterns with single backslashes."""
    return "{" + ", ".join(f"'{pattern}': {table}" for pattern, table in tables.items()) + "}"
