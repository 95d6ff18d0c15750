"""What a user may pass as a policy, as one `LayerPolicy` a layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from evenload.errors import EvenloadError
from evenload.plan.patterns import compile_pattern
from evenload.plan.policy import LayerPolicy as OneLayer
from evenload.plan.policy import Layers, Policy

Given = Policy | OneLayer | Mapping[str, Any] | Iterable[str]
"""A policy, what is in force on every layer, patterns with their layers, or patterns for all layers."""


def as_policy(given: Given, select: Iterable[str], exclude: Iterable[str], comm: Iterable[str], count: int) -> Policy:
    """The policy of a model with so many layers.

    Raises:
        EvenloadError: it cannot be read, or names a layer that the model does not have.
    """
    everything = frozenset(range(count))
    if isinstance(given, Policy):
        policy = given
    elif isinstance(given, OneLayer):
        policy = Policy(
            full=everything if given.full else frozenset(),
            select=dict.fromkeys(given.select, everything),
            comm=dict.fromkeys(given.comm, everything),
            select_exclude=dict.fromkeys(given.select_exclude, everything),
            comm_exclude=dict.fromkeys(given.comm_exclude, everything),
        )
    elif isinstance(given, Mapping):
        chosen = cast("Mapping[str, Any]", given)
        policy = Policy(select={pattern: _layers(pattern, on, everything) for pattern, on in chosen.items()})
    else:
        policy = Policy(select=dict.fromkeys(_patterns(given, "$.policy"), everything))
    extra = [_patterns(one, where) for one, where in ((select, "$.select"), (exclude, "$.exclude"), (comm, "$.comm"))]
    if any(extra):
        if policy != Policy():
            raise EvenloadError(
                "the patterns are given twice", where="$.policy", fix="give a policy, or `select`, `exclude` and `comm`"
            )
        policy = Policy(
            select=dict.fromkeys(extra[0], everything),
            select_exclude=dict.fromkeys(extra[1], everything),
            comm=dict.fromkeys(extra[2], everything),
        )
    _require_sense(policy, count)
    return policy


def _patterns(given: Any, where: str) -> tuple[str, ...]:
    if isinstance(given, str):
        raise EvenloadError("the patterns are one text", where=where, fix=f"write a list: [{given!r}]")
    if not isinstance(given, Iterable):
        raise EvenloadError(f"{given!r} is no policy", where=where, fix="give a list of patterns")
    return tuple(cast("Iterable[str]", given))


def _layers(pattern: str, on: Any, everything: Layers) -> Layers:
    where = f"$.policy[{pattern!r}]"
    if isinstance(on, bool):
        return everything if on else frozenset()
    if isinstance(on, (str, int)) or not isinstance(on, Iterable):
        raise EvenloadError(
            f"{on!r} names no layers", where=where, fix="write True, or the numbers of the layers: [0, 1]"
        )
    numbers = list(cast("Iterable[Any]", on))
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise EvenloadError(f"{number!r} is no layer", where=where, fix="count layers from 0")
    return frozenset(numbers)


def _require_sense(policy: Policy, count: int) -> None:
    """Every pattern can be read, and every layer that is named exists."""
    named: list[tuple[str, Layers]] = [("full", policy.full)]
    for field in ("select", "comm", "select_exclude", "comm_exclude"):
        patterns: Mapping[str, Layers] = getattr(policy, field)
        for pattern, on in patterns.items():
            where = f"$.policy.{field}[{pattern!r}]"
            try:
                compile_pattern(pattern)
            except EvenloadError as error:
                raise error.at(where) from None
            named.append((f"{field}[{pattern!r}]", on))
    for where, on in named:
        beyond = sorted(layer for layer in on if not 0 <= layer < count)
        if beyond:
            raise EvenloadError(
                f"the policy names layer {beyond[-1]}, but the model has {count} layers",
                where=f"$.policy.{where}",
                fix=f"layers count from 0 to {count - 1}",
            )
