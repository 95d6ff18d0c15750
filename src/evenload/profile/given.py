"""Layer tables that people already have, read as they are: time and memory per layer kind and recompute choice.

Three forms are understood:

* the layer file of MindSpore's pipeline balancing tool: `layers_description`, a list of HEAD, BODY and TAIL entries;
* any object that holds such a file under `layers` (a planning problem with its table inside);
* `head`, `body`, `tail` entries without names, `body` being one entry or a list of them.

Time model (source: mindspore-ai/toolkits, pipeline_balance, `utils/layer.py` and `utils/recompute.py`): forward takes
`time`, backward `2 * time`, and recomputation lengthens the backward of a body layer by a coefficient of each choice.
Memory model: a layer holds `memory_parameter` always, and what its choice keeps for every micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from evenload.errors import EvenloadError, Notice
from evenload.plan.policy import LayerPolicy, Recompute
from evenload.profile.numbers import count, entry, listed, number, read_data
from evenload.profile.profile import Cost, LayerProfile, Profile, Segment

Place = Literal["HEAD", "BODY", "TAIL"]

MAX_LAYERS: Final = 100_000

COEFFICIENTS: Final[Mapping[Recompute, float]] = MappingProxyType(
    {
        Recompute.NONE: 0.0,
        Recompute.SELECT: 0.04,
        Recompute.COMM: 0.125,
        Recompute.BOTH: 0.165,
        Recompute.FULL: 0.5,
    }
)
"""Share of a layer's backward that a choice adds, where the table does not say (the same source)."""

_MEMORY_KEYS: Final = {
    Recompute.NONE: ("memory_activation", "mem_act"),
    Recompute.SELECT: ("memory_select_rec", "mem_select"),
    Recompute.COMM: ("memory_select_comm", "mem_comm"),
    Recompute.BOTH: ("memory_both_comm_select", "mem_both"),
    Recompute.FULL: ("memory_recompute", "mem_full_recompute"),
}
_COEFFICIENT_KEYS: Final = {
    Recompute.NONE: ("backward_coef", "coef_none"),
    Recompute.SELECT: ("select_rec_coef", "coef_select"),
    Recompute.COMM: ("select_comm_coef", "coef_comm"),
    Recompute.BOTH: ("both_comm_select_coef", "both_coef", "coef_both"),
    Recompute.FULL: ("recompute_coef", "coef_full"),
}
_BACKWARD_KEYS: Final = {
    Recompute.NONE: ("backward_time",),
    Recompute.SELECT: ("select_rec_time",),
    Recompute.COMM: ("select_comm_time",),
    Recompute.BOTH: ("both_comm_select_time",),
    Recompute.FULL: ("recompute_time", "recompute_time "),  # the tool itself reads the key with a space at its end
}
_TIME: Final = ("time", "time_fwd")
_FORWARD: Final = ("forward_time",)
_COUNT: Final = ("nb_layer", "count")
_PARAMETERS: Final = ("memory_parameter", "mem_par")
_CONSTANT: Final = ("stage_const_mem", "constant")
_PLACES: Final[Mapping[str, Place]] = MappingProxyType({"head": "HEAD", "body": "BODY", "tail": "TAIL"})
_ENTRY_KEYS: Final = frozenset(
    {
        "name",
        "type",
        "model_name",
        *_TIME,
        *_FORWARD,
        *_COUNT,
        *_PARAMETERS,
        *(
            key
            for keys in (_MEMORY_KEYS, _COEFFICIENT_KEYS, _BACKWARD_KEYS)
            for names in keys.values()
            for key in names
        ),
    }
)
_TABLE_KEYS: Final = frozenset(
    {
        "name",
        "layers_description",
        "pre_defined_layer",
        "auto_partition_layer",
        "auto_partition_ends",
        "memory_unit",
        "time_unit",
        "head",
        "body",
        "tail",
        *_CONSTANT,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenLayer:
    """One entry of the table."""

    kind: str
    place: Place
    count: int
    """How many layers in a row are of this kind."""
    forward: float
    backward: Mapping[Recompute, float]
    """Backward time of every choice, what is recomputed included."""
    parameters: float
    """Memory that the layer holds always: parameters, gradients and optimizer states together."""
    kept: Mapping[Recompute, float]
    """Memory kept per micro-batch in flight, for the choices that the table has a number for."""

    @property
    def choices(self) -> tuple[Recompute, ...]:
        """Choices with a memory number; a head or tail has none to make."""
        return tuple(self.kept)

    def cost(self, policy: LayerPolicy) -> Cost:
        """Cost under a policy: a table knows whole choices only, whatever the patterns are.

        Raises:
            EvenloadError: the table has no memory number for the choice.
        """
        choice = policy.choice if self.place == "BODY" else Recompute.NONE
        if choice not in self.kept:
            raise EvenloadError(
                f"the table gives no memory for layers {self.kind!r} under recompute {choice.value!r}",
                where=f"$.{self.kind}",
                fix=f"add {_MEMORY_KEYS[choice][0]!r}, or use one of {', '.join(self.kept)}",
            )
        kept, backward = self.kept[choice], self.backward[choice]
        return Cost(
            forward_time=self.forward,
            backward_time=backward,
            recompute_time=max(0.0, backward - self.backward[Recompute.NONE]),
            forward=Segment(events=(kept,)),
            backward=Segment(events=(-kept,)),
        )

    def profile(self) -> LayerProfile:
        """The entry as a layer profile; the table does not divide its static memory into lines."""
        costs = {choice: self.cost(LayerPolicy.of(choice)) for choice in self.kept}

        def cost(policy: LayerPolicy) -> Cost:
            return costs.get(policy.choice) or self.cost(policy)

        return LayerProfile(
            kind=self.kind,
            parameters=self.parameters,
            gradients=0.0,
            optimizer=0.0,
            cost=cost,
            choices=self.choices,
        )


@dataclass(frozen=True, kw_only=True)
class GivenTable:
    """A layer table as it was read."""

    name: str
    layers: tuple[GivenLayer, ...]
    constant: float = 0.0
    """Memory that every stage holds whatever its layers."""
    memory_unit: str = "MB"
    time_unit: str = "units"
    notices: tuple[Notice, ...] = ()

    def kinds(self, place: Place) -> tuple[str, ...]:
        """Kind of every layer at a place, in order."""
        return tuple(layer.kind for layer in self.layers if layer.place == place for _ in range(layer.count))

    @cached_property
    def profile(self) -> Profile:
        """The table as a profile: peak = static + constant + what is kept in flight, no transient, no buffers."""
        return Profile(
            layers=MappingProxyType({layer.kind: layer.profile() for layer in self.layers}),
            blocks=self.kinds("BODY"),
            first=self.kinds("HEAD"),
            last=self.kinds("TAIL"),
            constant=self.constant,
            memory_unit=self.memory_unit,
            time_unit=self.time_unit,
            origin="given",
            notes=("A given table has no transient memory, no buffers and no communication time.",),
        )


def load_layer_table(path: str | Path) -> GivenTable:
    """Read a table from a JSON or YAML file.

    Raises:
        EvenloadError: the file cannot be read or is no table.
    """
    return read_layer_table(read_data(path), where=str(path))


def read_layer_table(data: object, where: str | None = None) -> GivenTable:
    """Read a table from parsed JSON or YAML.

    Args:
        data: the parsed file; it is not changed.
        where: name of the file, put before the `$.path` of an error.

    Raises:
        EvenloadError: with the path of the value that is missing, unknown, negative or absurd.
    """
    try:
        return _read(data)
    except EvenloadError as error:
        if where is None:
            raise
        raise error.at(f"{where}: {error.where or '$'}") from None


def _read(data: object) -> GivenTable:
    table, path = _table(entry(data, "$"))
    notices: list[Notice] = []
    _check_keys(table, _TABLE_KEYS, path, notices)
    layers: list[GivenLayer] = []
    for item, place, at in _entries(table, path):
        layers.append(_layer(item, place, at, notices))
    kinds = [layer.kind for layer in layers]
    for index, kind in enumerate(kinds):
        if kind in kinds[:index]:
            raise EvenloadError(f"two layers are named {kind!r}", where=path, fix="give every entry its own name")
    if not any(layer.place == "BODY" and layer.count for layer in layers):
        raise EvenloadError("the table has no body layer", where=path, fix="add an entry of type BODY")
    return GivenTable(
        name=str(table.get("name", "table")),
        layers=tuple(layers),
        constant=number(table, _CONSTANT, path, default=0.0),
        memory_unit=str(table.get("memory_unit", "MB")),
        time_unit=str(table.get("time_unit", "units")),
        notices=tuple(notices),
    )


def _table(data: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The table inside `data`, and its path."""
    path = "$"
    for key in ("model", "layers", "layer_table"):
        if isinstance(data.get(key), dict) and not {"layers_description", "body"} & data.keys():
            data, path = data[key], f"{path}.{key}"
    if "layers_description" in data or "body" in data:
        return data, path
    raise EvenloadError(
        "this is no layer table: it has neither 'layers_description' nor 'body'",
        where=path,
        fix="give a layer file with HEAD, BODY and TAIL entries, or an object that holds one under 'layers'",
    )


def _entries(table: dict[str, Any], path: str) -> list[tuple[dict[str, Any], Place, str]]:
    """Every entry with its place and path."""
    if "layers_description" in table:
        at = f"{path}.layers_description"
        described = [(item, f"{at}[{index}]") for index, item in enumerate(listed(table["layers_description"], at))]
        return [(entry(item, where), _place(item, where), where) for item, where in described]
    found: list[tuple[dict[str, Any], Place, str]] = []
    for key, place in _PLACES.items():
        at, value = f"{path}.{key}", table.get(key)
        if isinstance(value, list):
            items = [(item, f"{at}[{index}]") for index, item in enumerate(listed(table[key], at))]
        else:
            items = [(value, at)] if value is not None else []
        for index, (item, where) in enumerate(items):
            name = f"{place}{index}" if len(items) > 1 else place
            found.append(({"name": name, **entry(item, where)}, place, where))
    return found


def _place(item: object, path: str) -> Place:
    kind = entry(item, path).get("type")
    if kind == "HEAD" or kind == "BODY" or kind == "TAIL":  # noqa: PLR1714  # narrows the type
        return kind
    raise EvenloadError(f"the type of a layer is {kind!r}", where=f"{path}.type", fix="use HEAD, BODY or TAIL")


def _layer(item: dict[str, Any], place: Place, path: str, notices: list[Notice]) -> GivenLayer:
    _check_keys(item, _ENTRY_KEYS, path, notices)
    kind = item.get("name")
    if not isinstance(kind, str) or not kind:
        raise EvenloadError(f"the name of a layer is {kind!r}", where=f"{path}.name", fix="give it a name")
    repeated = count(item, _COUNT, path, default=None if place == "BODY" else 1, most=MAX_LAYERS)
    if place != "BODY" and repeated != 1:
        raise EvenloadError(
            f"a {place} layer is listed {repeated} times", where=f"{path}.nb_layer", fix="list each of them by itself"
        )
    time = number(item, _TIME, path)
    backward = _backward(item, time, path)
    kept = _kept(item, place, path)
    _compare(kind, kept, backward, path, notices)
    return GivenLayer(
        kind=kind,
        place=place,
        count=repeated,
        forward=number(item, _FORWARD, path, default=0.0) or time,
        backward=MappingProxyType(backward),
        parameters=number(item, _PARAMETERS, path),
        kept=MappingProxyType(kept),
    )


def _backward(item: dict[str, Any], time: float, path: str) -> dict[Recompute, float]:
    """Backward time of every choice: as given, or `2 * time * (1 + coefficient)`."""
    return {
        choice: number(item, _BACKWARD_KEYS[choice], path, default=0.0)
        or 2 * time * (1 + number(item, _COEFFICIENT_KEYS[choice], path, default=COEFFICIENTS[choice], most=100.0))
        for choice in Recompute
    }


def _kept(item: dict[str, Any], place: Place, path: str) -> dict[Recompute, float]:
    """Memory of every choice that the table has a number for; the tool reads 0 as "not measured"."""
    if place != "BODY":
        return {Recompute.NONE: number(item, _MEMORY_KEYS[Recompute.NONE], path, default=0.0)}
    kept = {choice: number(item, _MEMORY_KEYS[choice], path, default=0.0) for choice in Recompute}
    measured = {choice: memory for choice, memory in kept.items() if memory > 0}
    if not measured:
        raise EvenloadError(
            "a body layer has no activation memory", where=f"{path}.memory_activation", fix="give at least this number"
        )
    return measured


def _compare(
    kind: str, kept: dict[Recompute, float], backward: dict[Recompute, float], path: str, notices: list[Notice]
) -> None:
    """Say where a choice costs what it should save."""
    for choice, memory in kept.items():
        if memory > kept.get(Recompute.NONE, memory):
            notices.append(Notice(fact=f"{kind}: recompute {choice.value!r} keeps more than no recompute", where=path))
        if backward[choice] < backward[Recompute.NONE]:
            notices.append(Notice(fact=f"{kind}: recompute {choice.value!r} is faster than no recompute", where=path))


def _check_keys(item: dict[str, Any], known: frozenset[str], path: str, notices: list[Notice]) -> None:
    for key in item:
        if key in known:
            continue
        near = get_close_matches(key, known, n=1, cutoff=0.8)
        if near:  # a misspelt number must not become a silent default
            raise EvenloadError(f"unknown key {key!r}", where=f"{path}.{key}", fix=f"did you mean {near[0]!r}?")
        notices.append(Notice(fact=f"key {key!r} is not used", where=f"{path}.{key}"))
