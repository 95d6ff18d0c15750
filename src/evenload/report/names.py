"""The operators of every layer kind: what each keeps, and the pattern that frees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from evenload.plan.aliases import Name, Names, names
from evenload.plan.mincut import Decision, decide
from evenload.plan.operators import Graph
from evenload.plan.patterns import as_pattern, match
from evenload.plan.policy import LayerPolicy
from evenload.profile.profile import Profile
from evenload.report.table import columns
from evenload.units import human_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """A pattern, and what recomputing what it names frees on a layer."""

    pattern: str
    hits: int
    """Operators that it names."""
    freed: int
    """Bytes that the layer keeps less when this pattern alone is recomputed."""
    note: str | None = None
    """Why it frees nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One operator whose result a layer keeps."""

    operator: str
    """As it stands in PyTorch code, below the layer."""
    nbytes: int
    """Bytes of its results that the layer keeps."""
    setting: Literal["select", "comm"]
    """Where its pattern belongs: `comm` for collectives (`select_comm_recompute`), else `select`."""
    huggingface: Saving
    """The pattern in Hugging Face names."""
    mindformers: Saving | None
    """The pattern in MindFormers' names, where it has one."""


def operators(graph: Graph) -> Iterator[Kept]:
    """Every operator whose result a layer keeps, in the order they run."""
    kept = set(graph.kept())
    decided: dict[tuple[tuple[int, ...], bool], Decision] = {}

    @cache
    def saving(pattern: str, comm: bool) -> Saving:
        hits = match(pattern, graph).indices
        if (hits, comm) not in decided:  # patterns in different words often name the same operators
            policy = LayerPolicy(comm=(pattern,)) if comm else LayerPolicy(select=(pattern,))
            decided[hits, comm] = decide(graph, policy)
        decision = decided[hits, comm]
        return Saving(
            pattern=pattern,
            hits=len(hits),
            freed=decision.freed,
            note=decision.declined[0].reason if decision.declined else None,
        )

    known = names(graph)
    for index, operator in enumerate(graph.operators):
        mine = kept.intersection(operator.outputs)
        if mine:
            comm = operator.comm is not None
            sender = _sender(graph, index) if comm else index
            other = _mindformers(known[sender], graph.operators[sender].name)
            yield Kept(
                operator=operator.label,
                nbytes=graph.total(mine),
                setting="comm" if comm else "select",
                huggingface=saving(as_pattern((*_split(operator.path), operator.name)), comm),
                mindformers=saving(other, comm) if other else None,
            )


_MODULES: Final = ("attention", "attention_norm", "feed_forward", "ffn_norm")
"""Modules of a decoder layer in MindFormers."""
_WORDS: Final = ("matmul", "norm", "mul", "silu", "gelu", "flash_attention", "softmax", "add", "cast")
"""Operators as MindFormers calls them, those first that say more."""


def _mindformers(known: Names, name: str) -> str | None:
    """The pattern of an operator in MindFormers' names."""

    def rank(path: Name) -> tuple[int, int, Name]:
        last = path[-1]
        return (_WORDS.index(last) if last in _WORDS else len(_WORDS) + (last != name), -len(path), path)

    mine = [path for path in known.operator if path[0] in _MODULES]
    return as_pattern(min(mine, key=rank)) if mine else None


def _sender(graph: Graph, index: int) -> int:
    """The operator whose result a collective sends: MindFormers names a communication by it."""
    makers = [graph.producers[name] for name in graph.operators[index].inputs if name in graph.producers]
    return max(makers, default=index)


def _split(path: str) -> Name:
    return tuple(path.split(".")) if path else ()


def as_json(profile: Profile) -> dict[str, Any]:
    """Operators by kind, in bytes."""
    return {
        kind: {"kept": layer.graph.kept_bytes, "operators": [_json(one) for one in operators(layer.graph)]}
        for kind, layer in profile.layers.items()
        if layer.graph is not None
    }


def _json(kept: Kept) -> dict[str, Any]:
    return {
        "operator": kept.operator,
        "bytes": kept.nbytes,
        "setting": kept.setting,
        "huggingface": kept.huggingface,
        "mindformers": kept.mindformers,
    }


def operator_tables(profile: Profile) -> str:
    """A table for every kind of layer."""
    return "\n\n".join(_table(kind, layer.graph) for kind, layer in profile.layers.items() if layer.graph is not None)


def _table(kind: str, graph: Graph) -> str:
    kept = list(operators(graph))
    if not graph.kept_bytes:
        return f"{kind}: keeps nothing"
    title = f"{kind}: keeps {human_bytes(graph.kept_bytes)} per micro-batch"
    if graph.input in graph.kept():
        title += f", {human_bytes(graph.nbytes(graph.input))} of it the layer's input"
    rows = [
        (one.operator, human_bytes(one.nbytes), one.setting, *_cells(one.huggingface), *_cells(one.mindformers))
        for one in kept
    ]
    head = ("operator", "keeps", "setting", "pattern", "frees", "MindFormers' pattern", "frees")
    return "\n".join((title, columns(head, rows, left={0, 2, 3, 5})))


def _cells(saving: Saving | None) -> tuple[str, str]:
    if saving is None:
        return "-", "-"
    return saving.pattern, human_bytes(saving.freed) if saving.freed else "nothing"
