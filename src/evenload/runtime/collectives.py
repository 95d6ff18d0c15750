"""What a rank sends and receives in a step: which collectives, where they run and how much they move."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Collectives of one rank that are alike."""

    name: str
    """`all_gather`, `reduce_scatter`, `all_reduce`, `send`, ..., whatever operator does it."""
    ranks: int
    """Size of the group."""
    phase: str
    """What the step was doing."""
    module: str | None
    """Module path; None: outside modules."""
    nbytes: int
    """Bytes of the largest tensor that the rank puts in or gets out, all of them together."""
    count: int = 1


def alike(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """The same, modules of one name in all layers together; the most bytes come first."""
    groups: dict[tuple[str, int, str, str | None], Collective] = {}
    for one in collectives:
        module = None if one.module is None else _NUMBER.sub("*", one.module)
        key = (one.name, one.ranks, one.phase, module)
        known = groups.get(key, replace(one, module=module, nbytes=0, count=0))
        groups[key] = replace(known, nbytes=known.nbytes + one.nbytes, count=known.count + one.count)
    return tuple(sorted(groups.values(), key=lambda one: (-one.nbytes, one.module or "", one.name, one.phase)))


def of_all_layers(collectives: Iterable[Collective], path: str, source: Sequence[int]) -> tuple[Collective, ...]:
    """The collectives of all layers, from those of the layers that ran.

    Args:
        collectives: what was heard.
        path: module path of the list of layers.
        source: for every layer, the number under which the one that stands for it ran.

    Examples:
        >>> one = Collective(name="all_gather", ranks=8, phase="forward", module="layers.1.mlp", nbytes=64)
        >>> [two.module for two in of_all_layers([one], "layers", [0, 1, 1, 2])]
        ['layers.1.mlp', 'layers.2.mlp']
    """
    number = re.compile(rf"{re.escape(path)}\.(\d+)(?![^.])")
    stands: dict[int, list[int]] = {}
    for layer, ran in enumerate(source):
        stands.setdefault(ran, []).append(layer)
    everything: list[Collective] = []
    for one in collectives:
        found = None if one.module is None else number.search(one.module)
        if one.module is None or found is None:
            everything.append(one)
            continue
        begin, end = one.module[: found.start(1)], one.module[found.end(1) :]
        everything += [replace(one, module=f"{begin}{layer}{end}") for layer in stands.get(int(found[1]), ())]
    return tuple(everything)
