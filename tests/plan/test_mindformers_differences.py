"""One test for every row of `docs/differences.md`."""

import ast
import copy
import re
from pathlib import Path
from typing import Any

import pytest

from evenload import EvenloadError, LayerSetting

W1, W3, MUL = r"feed_forward\.w1\.matmul", r"feed_forward\.w3\.matmul", r"feed_forward\.mul"


def facts(setting: LayerSetting) -> str:
    return "\n".join(notice.fact for notice in setting.notices)


def refused(**settings: Any) -> EvenloadError:
    with pytest.raises(EvenloadError) as raised:
        LayerSetting(**settings)
    assert raised.value.where
    return raised.value


def in_force(setting: LayerSetting, pattern: str) -> list[int]:
    return [
        layer
        for layer in range(setting.layout.num_layers)
        if pattern in setting.for_layer(layer).select + setting.for_layer(layer).comm
    ]


# --- layers to stages


def test_one_offset_for_every_chunk_is_refused_where_it_invents_layers() -> None:
    for offset in (1, True):
        error = refused(num_layers=33, pp=4, offset=offset)
        assert "4 in all" in error.fact
        assert "offset: [0, 1, 0, 0] works" in str(error)


def test_one_row_for_every_interleave_is_refused_where_it_invents_layers() -> None:
    error = refused(num_layers=10, pp=1, pp_interleave_num=4, offset=[2])
    assert "repeated for each of the 4 interleaves, 8 in all" in error.fact
    assert "offset: [[0], [1], [1], [0]] works" in str(error)


def test_fractions_text_and_true_in_an_offset_are_read_as_there_and_said() -> None:
    fractions = LayerSetting(33, pp=4, offset=[0.5, 0.9, 0.2, 1.0])
    assert fractions.layer_list == [[8, 8, 8, 9]]
    assert "0.9 is read as 0" in facts(fractions)
    assert "'1' is read as 1" in facts(LayerSetting(33, pp=4, offset=["0", "0", "0", "1"]))
    assert "True is read as 1" in facts(LayerSetting(33, pp=4, offset=[0, 0, 0, True]))


def test_a_chunk_below_zero_layers_is_refused() -> None:
    assert "with -1 layers" in refused(num_layers=8, pp=4, offset=[0, -3, 3, 0]).fact


def test_a_chunk_of_zero_layers_is_said() -> None:
    setting = LayerSetting(8, pp=4, offset=[0, 2, 0, -2])
    assert setting.layer_list == [[2, 4, 2, 0]]
    assert "stage 3 of chunk 0 holds no layer" in facts(setting)


def test_a_first_chunk_below_the_share_is_fine_without_a_pipeline() -> None:
    assert LayerSetting(8, pp=1, pp_interleave_num=2, offset=[[-1], [1]]).layer_list == [[3], [5]]


# --- counts


def test_negative_counts_per_stage_are_refused() -> None:
    for value in ([-1, 0, 0, 0], [0, 0, 0, -3]):
        assert "cannot be recomputed" in refused(num_layers=16, pp=4, recompute=value).fact
        assert "cannot be recomputed" in refused(num_layers=16, pp=4, select_recompute={"a": value}).fact


def test_negative_counts_per_chunk_mean_none_and_are_said() -> None:
    setting = LayerSetting(6, pp=2, recompute=[[-2, 2]])
    assert setting.layer_recompute == [[-2, 2]]
    assert setting.policy.full == {3, 4}
    assert "[0][0] is -2: no layer is recomputed there" in facts(setting)


def test_too_few_counts_per_stage_are_said() -> None:
    setting = LayerSetting(16, pp=4, recompute=[3])
    assert setting.layer_recompute == [[3, 0, 0, 0]]
    assert "1 counts for 4 stages" in facts(setting)


def test_too_short_rows_are_refused_at_once() -> None:
    assert refused(num_layers=16, pp=4, recompute=[[1, 2]]).where == "$.recompute[0]"
    assert refused(num_layers=16, pp=2, pp_interleave_num=2, select_recompute=[[1, 2]]).where == "$.select_recompute"


def test_one_list_for_two_default_patterns_is_read_for_both() -> None:
    setting = LayerSetting(10, pp=5, select_recompute=[[3, True, 2, 1, 2]])
    assert list(setting.select_recompute.values()) == [[[2, 2, 2, 1, 2]]] * 2
    assert "[0][0] asks for 3 layers, the chunk has 2" in facts(setting)


def test_lists_of_the_caller_stay_as_they_are() -> None:
    counts = [True, 9, [False, True][0], 1]
    settings = {"recompute": counts, "select_recompute": [[True, 9, False, 1]], "select_comm_recompute": {"a": counts}}
    before = copy.deepcopy(settings)
    LayerSetting(16, pp=4, **settings)
    assert repr(settings) == repr(before)


def test_tuples_are_as_good_as_lists() -> None:
    setting = LayerSetting(16, pp=4, recompute=((1, True, 9, False),))
    assert setting.layer_recompute == [[1, 4, 4, 0]]


def test_names_under_full_recompute_are_said_to_say_nothing() -> None:
    setting = LayerSetting(4, pp=2, recompute=["attention"])
    assert setting.layer_recompute == [[2, 2]]
    assert "names say nothing here" in facts(setting)


# --- patterns


def test_a_plain_dot_between_levels_is_said() -> None:
    setting = LayerSetting(4, pp=2, select_recompute=["feed_forward.mul"])
    assert setting.notices[0].fix == r"'feed_forward\.mul'?"


def test_a_broken_pattern_is_refused_when_it_is_read() -> None:
    for pattern in (r"feed_forward\.(", r"feed[_\.]forward\.mul"):
        for name in ("select_recompute", "select_comm_recompute", "select_recompute_exclude"):
            assert refused(num_layers=4, pp=2, **{name: [pattern]}).where == f"$.{name}"
            assert refused(num_layers=4, pp=2, **{name: {pattern: False}}).where == f"$.{name}"


def test_two_patterns_on_one_operator_are_said() -> None:
    setting = LayerSetting(4, pp=2, select_recompute={r"feed_forward\.w.*\.matmul": [1, 1], W3: True})
    assert "name the same operator on layers 0,2: MindFormers stops with a TypeError" in facts(setting)
    apart = LayerSetting(4, pp=2, recompute=[1, 1], select_recompute={r"feed_forward\.w.*\.matmul": [1, 1], W3: True})
    assert "same operator" not in facts(apart)


# --- excludes


def test_an_exclude_of_some_layers_leaves_the_pattern_on_the_others() -> None:
    setting = LayerSetting(16, pp=4, select_recompute={MUL: True}, select_recompute_exclude={MUL: [2, 0, 2, 0]})
    assert in_force(setting, MUL) == [layer for layer in range(16) if layer not in {0, 1, 8, 9}]
    assert setting.select_recompute == {}  # the table is what MindFormers logs
    assert f"MindFormers drops '{MUL}' from select_recompute on every layer" in facts(setting)
    assert "on layers 2-7,10-15" in facts(setting)


def test_an_exclude_that_is_false_takes_nothing_off() -> None:
    setting = LayerSetting(4, pp=2, select_recompute={MUL: True, W1: True}, select_recompute_exclude={MUL: False})
    assert in_force(setting, MUL) == [0, 1, 2, 3]
    assert list(setting.select_recompute) == [W1]
    assert f"MindFormers drops '{MUL}'" in facts(setting)


def test_an_exclude_takes_off_every_pattern_that_it_covers() -> None:
    patterns = {W1: True, W3: True, MUL: True}
    setting = LayerSetting(4, pp=2, select_recompute=patterns, select_recompute_exclude=[r"feed_forward\.w.\.matmul"])
    assert in_force(setting, W1) == in_force(setting, W3) == []
    assert in_force(setting, MUL) == [0, 1, 2, 3]
    assert "name the same operator" in facts(setting)  # MindFormers drops the first only, and stops at the second


def test_an_exclude_leaves_a_wider_pattern_its_other_operators() -> None:
    wide = r"feed_forward\.w.\.matmul"
    setting = LayerSetting(4, pp=2, select_recompute=[wide], select_recompute_exclude=[W1])
    view = setting.for_layer(0)
    assert (view.select, view.select_exclude) == ([wide], [W1])
    assert f"MindFormers drops '{wide}'" in facts(setting)
    comm = LayerSetting(4, pp=2, select_comm_recompute=True, select_comm_recompute_exclude=[r"ffn_norm\.norm"])
    assert (comm.for_layer(0).comm, comm.for_layer(0).comm_exclude) == ([r".*\.norm"], [r"ffn_norm\.norm"])


def test_an_exclude_without_a_pattern_is_said_to_do_nothing() -> None:
    for value in (True, [1, 1], "attention", 3):
        setting = LayerSetting(4, pp=2, select_recompute=True, select_recompute_exclude=value)
        assert in_force(setting, MUL) == [0, 1, 2, 3]
        assert "names no pattern" in facts(setting)


# --- switches of the whole run


def test_slices_are_kept_on_every_full_layer() -> None:
    setting = LayerSetting(4, pp=2, recompute=[1, 1], recompute_slice_activation=True)
    assert setting.policy.slice_activation
    assert "only where recompute is simply true" in facts(setting)
    assert facts(LayerSetting(4, pp=2, recompute=True, recompute_slice_activation=True)) == ""


def test_under_swap_lists_hold_layers_and_excludes_are_followed() -> None:
    setting = LayerSetting(4, pp=2, recompute=[3], select_recompute=True, select_recompute_exclude=[MUL], swap=True)
    assert setting.for_layer(3).full
    assert in_force(setting, MUL) == []
    assert "the numbers are layers, not counts: layers 3" in facts(setting)
    assert "MindFormers ignores this list" in facts(setting)
    assert "there is no layer 4" in refused(num_layers=4, pp=2, recompute=[4], swap=True).fact
    assert refused(num_layers=4, pp=2, recompute=[True, False], swap=True).where == "$.recompute[0]"


def test_the_page_lists_every_test_of_this_file_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs/differences.md").read_text(encoding="utf-8")
    here = {node.name for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if hasattr(node, "name")}
    tests = {name for name in here if name.startswith("test_")}
    tests -= {test_the_page_lists_every_test_of_this_file_and_no_other.__name__}
    assert set(re.findall(r"`(test_\w+)`", page)) == tests
