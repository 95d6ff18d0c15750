"""What every dialect gives back when it reads, and when it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from evenload.errors import Notice
from evenload.plan.layout import Table
from evenload.plan.plan import Plan
from evenload.plan.policy import counts

Dialect = Literal["evenload", "mindformers", "mindformers-pynative", "megatron"]
"""The dialects that can be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Recomputed layers as counts of [chunk][stage], as a framework logs them."""

    full: Table
    select: Mapping[str, Table]
    comm: Mapping[str, Table]

    @classmethod
    def of(cls, plan: Plan) -> Tables:
        """How many layers of every chunk stand behind each switch of a plan."""
        return cls(
            full=counts(plan.policy.full, plan.layout),
            select={pattern: counts(layers, plan.layout) for pattern, layers in plan.policy.select.items()},
            comm={pattern: counts(layers, plan.layout) for pattern, layers in plan.policy.comm.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a settings file says."""

    dialect: Dialect
    plan: Plan
    notices: tuple[Notice, ...] = ()
    """What was assumed, and what the reader of the file should know; each with its place."""
    limit: int | None = None
    """Memory of one device in bytes, where the file names it."""
    model_config: Mapping[str, Any] | None = None
    """The model in the keys of a Hugging Face `config.json`, where the file describes one."""
    log: tuple[str, ...] = ()
    """The lines that the framework itself logs for these settings."""
    tables: Tables | None = None
    """The tables that the framework itself makes, where they are not just the plan's counts."""
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    """Recompute pattern -> `file:line:column` where it is written."""
    written: Mapping[str, str] = field(default_factory=dict[str, str])
    """Recompute pattern of the plan -> the text in the file, where the dialect spells patterns its own way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """A plan in the words of another program."""

    text: str
    losses: tuple[Notice, ...] = ()
    """What the target cannot express: what is lost, and what was written instead."""


class Losses:
    """Collects what a writer could not say."""

    def __init__(self) -> None:
        self._notices: list[Notice] = []

    def add(self, fact: str, where: str, fix: str | None = None) -> None:
        """Name one loss, with the place in the plan as a `$.path`."""
        self._notices.append(Notice(fact=fact, where=where, fix=fix))

    @property
    def notices(self) -> tuple[Notice, ...]:
        """All of them, in order."""
        return tuple(self._notices)
