"""evenload against what MindFormers' own class made of the same settings."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from evenload import EvenloadError, LayerSetting

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data/layer_setting/cases.json").read_text(encoding="utf-8")
)
TABLES = (
    "layer_list",
    "layer_accu",
    "layer_recompute",
    "select_recompute",
    "select_comm_recompute",
    "select_recompute_exclude",
    "select_comm_recompute_exclude",
)
VALUE_ACCIDENTS = {"layer_list_total_differs_from_num_layers", "negative_layer_count"}
MEANS_SOMETHING = {"ls0094", "ls0095", "ls0125", "ls0126"}
"""Refused there for the sake of a tuple; the words are clear."""


def decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if "$tuple" in value:
            return tuple(map(decoded, value["$tuple"]))
        return {key: decoded(entry) for key, entry in value.items()}
    return [decoded(entry) for entry in value] if isinstance(value, list) else value


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    settings = decoded(case["settings"])
    if settings.pop("pipeline_interleave", True) is False:
        settings["pp_interleave_num"] = 1
    return settings


def expanded(runs: list[list[int]]) -> list[int]:
    return [value for value, length in runs for _ in range(length)]


def layers_of(runs: list[list[int]]) -> list[int]:
    return [layer for first, last in runs for layer in range(first, last + 1)]


def ids(cases: list[dict[str, Any]]) -> list[str]:
    return [case["id"] for case in cases]


ANSWERED = [case for case in CASES if "error" not in case and not VALUE_ACCIDENTS.intersection(case.get("flags", ()))]
REFUSED = [case for case in CASES if "error" in case]
SHARED_LIST = [
    case
    for case in REFUSED
    if "aliased_2d_list_rejected_on_second_default_pattern" in case.get("flags", ())
    and case["id"] != "ls1136"  # its full recompute counts are fractions
]
NO_MEANING = [case for case in REFUSED if case not in SHARED_LIST and case["id"] not in MEANS_SOMETHING]


@pytest.mark.parametrize("case", ANSWERED, ids=ids(ANSWERED))
def test_tables_and_ids_are_those_of_mindformers(case: dict[str, Any]) -> None:
    setting = LayerSetting(**settings_of(case))
    for name in TABLES:
        if name in case:
            assert getattr(setting, name) == case[name], name
            if isinstance(case[name], dict):
                assert list(getattr(setting, name)) == list(case[name])  # patterns apply in the order of the settings
    assert setting.pp_ids == expanded(case["pp_ids"])
    assert setting.interleave_ids == expanded(case["interleave_ids"])


WITHOUT_EXCLUDE = [case for case in ANSWERED if not any("exclude" in name for name in case["settings"])]


@pytest.mark.parametrize("case", WITHOUT_EXCLUDE, ids=ids(WITHOUT_EXCLUDE))
def test_every_layer_gets_what_mindformers_gives_it(case: dict[str, Any]) -> None:
    setting = LayerSetting(**settings_of(case))
    views = [setting.for_layer(layer) for layer in range(case["settings"]["num_layers"])]
    assert [view.layer for view in views if view.full] == layers_of(case["plan"]["full"])
    for name in ("select", "comm"):
        applied: dict[str, list[int]] = {}
        for view in views:
            for pattern in getattr(view, name):
                applied.setdefault(pattern, []).append(view.layer)
        assert applied == {pattern: layers_of(runs) for pattern, runs in case["plan"][name].items()}
    assert [view.stage for view in views] == expanded(case["pp_ids"])
    assert [view.chunk for view in views] == expanded(case["interleave_ids"])


@pytest.mark.parametrize("case", NO_MEANING, ids=ids(NO_MEANING))
def test_settings_without_a_meaning_are_refused_with_advice(case: dict[str, Any]) -> None:
    with pytest.raises(EvenloadError) as raised:
        LayerSetting(**settings_of(case))
    assert raised.value.where
    assert raised.value.where.startswith("$.")


OVERALLOCATED = [case for case in CASES if VALUE_ACCIDENTS.intersection(case.get("flags", ()))]


@pytest.mark.parametrize("case", OVERALLOCATED, ids=ids(OVERALLOCATED))
def test_offsets_that_lose_or_invent_layers_are_refused_with_one_that_works(case: dict[str, Any]) -> None:
    with pytest.raises(EvenloadError, match="works") as raised:
        LayerSetting(**settings_of(case))
    assert raised.value.where.startswith("$.offset")


@pytest.mark.parametrize("case", SHARED_LIST, ids=ids(SHARED_LIST))
def test_one_list_for_both_default_patterns_counts_for_both(case: dict[str, Any]) -> None:
    settings = settings_of(case)
    setting = LayerSetting(**settings)
    by_pattern = dict.fromkeys(setting.policy.select, settings["select_recompute"])
    apart = LayerSetting(**(copy.deepcopy(settings) | {"select_recompute": by_pattern}))
    assert setting.select_recompute == apart.select_recompute
    assert setting.policy == apart.policy


@pytest.mark.parametrize("case", [case for case in CASES if case["id"] in MEANS_SOMETHING], ids=lambda case: case["id"])
def test_tuples_mean_what_lists_mean(case: dict[str, Any]) -> None:
    settings = settings_of(case)
    as_lists = settings | {"recompute": json.loads(json.dumps(settings["recompute"]))}
    assert LayerSetting(**settings).layer_recompute == LayerSetting(**as_lists).layer_recompute


def test_no_case_changes_what_the_caller_holds() -> None:
    for case in CASES:
        settings = settings_of(case)
        before = copy.deepcopy(settings)
        with contextlib.suppress(EvenloadError):
            LayerSetting(**settings)
        assert settings == before, case["id"]
        assert json.dumps(settings) == json.dumps(before), case["id"]  # true and 1 are equal in Python, not in a file
