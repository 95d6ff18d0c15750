"""Where MindFormers does something else with the same recompute lists, as notices.

Source: the `LayerSetting` class of MindFormers r1.6, run and recorded; every difference is listed in
`docs/differences.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations

from evenload.errors import Notice
from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.patterns import compile_pattern
from evenload.plan.policy import Layers, covers
from evenload.plan.recompute_lists import RecomputeLists, Switched


def differences(lists: RecomputeLists, *, swap: bool, slices_lists: bool) -> tuple[Notice, ...]:
    """What a run of MindFormers would do otherwise than the plan says.

    Args:
        lists: the settings.
        swap: `swap_config` is on.
        slices_lists: `recompute_slice_activation` is on while `recompute` is not simply true.
    """
    notices: list[Notice] = []
    full = lists.full.layers
    for name, patterns, excludes in (
        ("select_recompute", lists.select, lists.select_exclude),
        ("select_comm_recompute", lists.comm, lists.comm_exclude),
    ):
        if swap:
            notices += _ignored(f"$.{name}_exclude", excludes)
        else:
            notices += _dropped_everywhere(name, patterns, excludes, full)
    left = lists.select if swap else after_drops(lists.select, lists.select_exclude)
    notices += _named_twice(left, {} if swap else lists.select_exclude, full)
    if slices_lists and full:
        notices.append(
            Notice(
                fact="MindFormers slices activations only where recompute is simply true, evenload on every full layer",
                where="$.recompute_slice_activation",
            )
        )
    return tuple(notices)


def after_drops(patterns: Mapping[str, Switched], excludes: Mapping[str, Switched]) -> dict[str, Switched]:
    """The patterns that MindFormers logs: every exclude drops the first one that it matches, on all layers."""
    left = dict(patterns)
    for _, pattern in _drops(patterns, excludes):
        del left[pattern]
    return left


def _drops(patterns: Mapping[str, Switched], excludes: Mapping[str, Switched]) -> Iterator[tuple[str, str]]:
    """(exclude, the pattern it drops): the first that is left whose levels match it one by one, either way round."""
    left = list(patterns)
    for exclude in excludes:
        for pattern in left:
            if _match_either_way(exclude, pattern):
                left.remove(pattern)
                yield exclude, pattern
                break


def _match_either_way(one: str, other: str) -> bool:
    ones, others = compile_pattern(one).levels, compile_pattern(other).levels
    return len(ones) == len(others) and all(
        a.fullmatch(b.pattern) or b.fullmatch(a.pattern) for a, b in zip(ones, others, strict=True)
    )


def _ignored(where: str, excludes: Mapping[str, Switched]) -> list[Notice]:
    if not excludes:
        return []
    return [Notice(fact="with swap on, MindFormers ignores this list; evenload follows it", where=where)]


def _dropped_everywhere(
    name: str, patterns: Mapping[str, Switched], excludes: Mapping[str, Switched], full: Layers
) -> Iterator[Notice]:
    for exclude, pattern in _drops(patterns, excludes):
        kept = patterns[pattern].layers - excludes[exclude].layers - full
        if kept:
            yield Notice(
                fact=f"MindFormers drops '{pattern}' from {name} on every layer; evenload excludes '{exclude}' only "
                f"where the list says, and keeps '{pattern}' on layers {layer_ranges(kept)}",
                where=f"$.{name}_exclude['{exclude}']",
                fix=f"for the same in both, give the layers of '{pattern}' as counts and no exclude",
            )
        elif not covers(exclude, pattern) and patterns[pattern].layers - full:
            yield Notice(
                fact=f"MindFormers drops '{pattern}' from {name}; evenload leaves out of it what '{exclude}' names",
                where=f"$.{name}_exclude['{exclude}']",
                fix=f"for the same in both, take '{pattern}' out of {name}",
            )


def _named_twice(patterns: Mapping[str, Switched], excludes: Mapping[str, Switched], full: Layers) -> Iterator[Notice]:
    """Two patterns on one operator: the second call on the primitive fails in MindFormers."""
    pairs = [(wide, narrow, patterns[wide]) for wide, narrow in permutations(patterns, 2)]
    pairs += [(wide, narrow, switched) for wide, switched in excludes.items() for narrow in patterns]
    for wide, narrow, switched in pairs:
        layers = (switched.layers & patterns[narrow].layers) - full
        if layers and covers(wide, narrow):
            yield Notice(
                fact=f"'{wide}' and '{narrow}' name the same operator on layers {layer_ranges(layers)}: MindFormers "
                "stops with a TypeError there, evenload takes the operator once",
                where=f"$.select_recompute['{narrow}']",
                fix="name every operator in one pattern only",
            )
