"""evenload's own plan file: a `Plan`, whole, as YAML or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from evenload.dialects.known_blocks import hugging_face_blocks, mindformers_llama, unmatched
from evenload.dialects.ranges import read_ranges
from evenload.dialects.reading import Reading, Writing
from evenload.dialects.typed import at, decode, listed, mapping, refuse_unknown, relocated, shown
from evenload.dialects.yaml_source import YamlSource
from evenload.dialects.yaml_text import flow, quoted, scalar
from evenload.errors import EvenloadError
from evenload.plan.layer_ranges import layer_ranges
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Layers, Policy
from evenload.setup import Setup

VERSION: Final = 1
"""Version of the format, the value of the key `evenload`."""
_KEYS: Final = ["evenload", "model", "profile", "setup", "layout", "policy"]
_PATTERNS: Final = ("select", "comm", "select_exclude", "comm_exclude")


def write_native(plan: Plan) -> Writing:
    """The plan as evenload YAML. Reading it back gives the same plan.

    Raises:
        EvenloadError: the policy names a layer that the layout does not have.
    """
    lines = [
        f"evenload: {VERSION}",
        f"model: {scalar(plan.model)}",
        *([] if plan.profile is None else [f"profile: {scalar(plan.profile)}"]),
        "setup:",
        *(f"  {field.name}: {scalar(getattr(plan.setup, field.name))}" for field in fields(Setup)),
        "layout:  # layers of [chunk][stage]",
        *(f"  - {flow(row)}" for row in plan.layout.table),
        "policy:  # layers behind each switch, counted from 0",
        f"  full: {scalar(_ranges(plan.policy.full, plan.layout))}",
    ]
    for name in _PATTERNS:
        patterns: Mapping[str, Layers] = getattr(plan.policy, name)
        lines.append(f"  {name}:" + ("" if patterns else " {}"))
        lines += [
            f"    {quoted(pattern)}: {scalar(_ranges(layers, plan.layout))}" for pattern, layers in patterns.items()
        ]
    lines += [f"  {name}: {scalar(getattr(plan.policy, name))}" for name in _flags()]
    return Writing(text="\n".join(lines) + "\n")


def read_native(source: YamlSource) -> Reading:
    """The plan in an evenload file.

    Raises:
        EvenloadError: with `file:line:column`.
    """
    refuse_unknown(source, (), source.data, _KEYS)
    version: Any = source.data.get("evenload", VERSION)
    if version is True or version != VERSION:
        raise source.error(
            f"this is version {shown(version)} of the plan format, evenload reads {VERSION}",
            "evenload",
            fix="write the plan again with this version of evenload",
        )
    for key in ("setup", "layout"):
        if key not in source.data:
            raise source.error(f"the plan has no {key}", fix=f"add {key}: ...")
    names: dict[str, Any] = {key: source.data.get(key) for key in ("model", "profile")}
    for key, name in names.items():
        if name is not None and not isinstance(name, str):
            raise source.error(f"{shown(name)} is no {key}", key, fix="give a name or a path, or null")
    setup = decode(source, ("setup",), Setup)
    layout = _layout(source)
    policy = _policy(source, layout)
    try:
        plan = Plan(setup=setup, layout=layout, policy=policy, **names)
    except EvenloadError as error:
        raise relocated(source, error) from None
    places = _places(source)
    patterns = {pattern: len(layers) for name in _PATTERNS for pattern, layers in getattr(policy, name).items()}
    nowhere = unmatched(patterns, (*hugging_face_blocks(), mindformers_llama()), places=places)
    notices = (*layout.notices(source.where("layout")), *nowhere.values())
    return Reading(dialect="evenload", plan=plan, notices=notices, places=places)


def _layout(source: YamlSource) -> Layout:
    table = source.data["layout"]
    rows = [row for item in listed(table) or () if (row := listed(item)) is not None]
    if listed(table) is None or len(rows) != len(table):
        raise source.error(f"{shown(table)} is no table", "layout", fix="write one row of layer counts per chunk")
    for chunk, row in enumerate(rows):
        for stage, count in enumerate(row):
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 100_000:
                raise source.error(
                    f"{shown(count)} is no number of layers", "layout", chunk, stage, fix="write a whole number"
                )
    try:
        return Layout(tuple(map(tuple, rows)))
    except EvenloadError as error:
        raise relocated(source, error.at((error.where or "$").replace("$.table", "$.layout"))) from None


def _policy(source: YamlSource, layout: Layout) -> Policy:
    if source.data.get("policy") is None:
        return Policy()
    policy = mapping(source.data["policy"])
    if policy is None:
        raise source.error(f"{shown(source.data['policy'])} is no policy", "policy", fix="write `full: 0-3,8` below it")
    refuse_unknown(source, ("policy",), policy, [field.name for field in fields(Policy)])
    switches: dict[str, Any] = {name: _pattern_layers(source, name, layout) for name in _PATTERNS}
    for name in _flags():
        if name in policy:
            if not isinstance(policy[name], bool):
                raise source.error(f"{shown(policy[name])} is no switch", "policy", name, fix="write true or false")
            switches[name] = policy[name]
    try:
        full = read_ranges(policy.get("full", "none"), layout.num_layers, where="$.policy.full")
    except EvenloadError as error:
        raise relocated(source, error) from None
    return Policy(full=full, **switches)


def _pattern_layers(source: YamlSource, name: str, layout: Layout) -> dict[str, Layers]:
    value = at(source, ("policy", name))
    if value is None:
        return {}
    patterns = mapping(value)
    if patterns is None:
        raise source.error(f"{shown(value)} is no mapping", "policy", name, fix="write `pattern: layers` below it")
    found: dict[str, Layers] = {}
    for pattern, layers in patterns.items():
        try:
            found[pattern] = read_ranges(layers, layout.num_layers, where="$")
        except EvenloadError as error:
            raise error.at(source.where("policy", name, pattern)) from None
    return found


def _places(source: YamlSource) -> dict[str, str]:
    return {
        pattern: source.where("policy", name, pattern, key=True)
        for name in _PATTERNS
        for pattern in mapping(at(source, ("policy", name))) or {}
    }


def _ranges(layers: Layers, layout: Layout) -> str:
    if layers and max(layers) >= layout.num_layers:
        raise EvenloadError(f"the policy names layer {max(layers)}, the layout holds {layout.num_layers} layers")
    return layer_ranges(layers)


def _flags() -> list[str]:
    """The switches of a policy that hold for the whole run."""
    return [field.name for field in fields(Policy) if field.name not in ("full", *_PATTERNS)]
