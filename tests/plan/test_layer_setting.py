import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.test_layout import layouts

from evenload import EvenloadError, LayerSetting
from evenload.plan.layout import Layout

DATA = Path(__file__).parents[1] / "data/layer_setting"
DOCUMENTED: dict[str, Any] = {
    "num_layers": 48,
    "pp": 5,
    "pp_interleave_num": 2,
    "offset": [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
    "recompute": [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
    "select_recompute": {
        r"feed_forward\.w1\.activation\.silu": True,
        r"feed_forward\.mul": True,
        r"feed_forward\.w1\.matmul": [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]],
        r"feed_forward\.w3\.matmul": [2, 1, 0, 0, 0],
    },
    "select_comm_recompute": [r"ffn_norm\.norm", r"attention_norm\.norm"],
}
"""The example of MindFormers' documentation (r1.5), "Offset and recompute"."""

NAMES = ("select_recompute", "select_comm_recompute", "select_recompute_exclude", "select_comm_recompute_exclude")


def test_the_documented_example_logs_what_the_documentation_shows() -> None:
    shown = (DATA / "documented_log.txt").read_text(encoding="utf-8")
    assert "\n".join(LayerSetting(**DOCUMENTED).log_lines()) + "\n" == shown
    assert str(LayerSetting(**DOCUMENTED)) + "\n" == shown


def test_exclude_lists_are_logged_where_they_are_given() -> None:
    setting = LayerSetting(4, pp=2, select_recompute_exclude={"a": True}, select_comm_recompute_exclude={"b": [1, 0]})
    assert setting.log_lines()[-2:] == [
        "INFO - Formative select_recompute_exclude: {'a': [[2, 2]]}",
        "INFO - Formative select_comm_recompute_exclude: {'b': [[1, 0]]}",
    ]


def test_a_layer_says_all_that_happens_to_it() -> None:
    setting = LayerSetting(**DOCUMENTED)
    assert setting.for_layer(0).full
    assert setting.for_layer(0).select == setting.for_layer(0).comm == []
    view = setting.for_layer(29)
    assert (view.stage, view.chunk, view.full) == (1, 1, False)
    assert view.select == [
        r"feed_forward\.w1\.activation\.silu",
        r"feed_forward\.mul",
        r"feed_forward\.w1\.matmul",
    ]
    assert view.comm == [r"ffn_norm\.norm", r"attention_norm\.norm"]


def test_there_is_no_layer_beyond_the_last() -> None:
    for layer in (-1, 48):
        with pytest.raises(EvenloadError, match="there is no layer"):
            LayerSetting(**DOCUMENTED).for_layer(layer)


def test_tables_are_plain_lists_of_their_own() -> None:
    setting = LayerSetting(**DOCUMENTED)
    for name in ("layer_list", "layer_accu", "layer_recompute"):
        table = getattr(setting, name)
        table[0][0] = 99
        assert getattr(setting, name)[0][0] != 99
    setting.pp_ids.clear()
    setting.select_recompute.clear()
    assert len(setting.pp_ids) == 48
    assert len(setting.select_recompute) == 4


def test_a_later_edit_of_the_settings_changes_nothing() -> None:
    settings = copy.deepcopy(DOCUMENTED)
    setting = LayerSetting(**settings)
    before = setting.log_lines(), setting.policy
    settings["offset"][0][0] = 7
    settings["recompute"][0][0] = 0
    settings["select_recompute"][r"feed_forward\.w3\.matmul"][0] = 0
    settings["select_recompute"].clear()
    settings["select_comm_recompute"].clear()
    assert (setting.log_lines(), setting.policy) == before


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    layout = draw(layouts())
    entry = st.one_of(st.booleans(), st.integers(0, 12))
    row = st.lists(entry, min_size=layout.pp, max_size=layout.pp)
    flat = st.one_of(st.booleans(), row)
    table = st.lists(st.one_of(st.booleans(), row), min_size=layout.interleave, max_size=layout.interleave)
    counted = st.one_of(flat, table.filter(lambda rows: any(isinstance(row, list) for row in rows)))
    pattern = st.sampled_from([r"feed_forward\.mul", r"feed_forward\.w.\.matmul", r"ffn_norm\.norm", "attention"])
    named = st.one_of(counted, st.lists(pattern), st.dictionaries(pattern, counted))
    return {
        "num_layers": layout.num_layers,
        "pp": layout.pp,
        "pp_interleave_num": layout.interleave,
        "offset": [list(row) for row in layout.offsets()],
        "recompute": draw(counted),
        **{name: draw(named) for name in NAMES},
    }


@given(settings())
def test_the_caller_keeps_what_he_wrote(given_settings: dict[str, Any]) -> None:
    before = copy.deepcopy(given_settings)
    LayerSetting(**given_settings)
    assert repr(given_settings) == repr(before)


@given(settings())
def test_tables_and_layers_say_the_same_where_nothing_is_excluded(given_settings: dict[str, Any]) -> None:
    setting = LayerSetting(**given_settings | {name: False for name in NAMES if "exclude" in name})
    for chunk, stage, layers in setting.layout.chunks():
        for nth, layer in enumerate(layers):
            view = setting.for_layer(layer)
            assert (view.chunk, view.stage) == (chunk, stage)
            assert view.full is (nth < setting.layer_recompute[chunk][stage])
            for patterns, tables in (
                (view.select, setting.select_recompute),
                (view.comm, setting.select_comm_recompute),
            ):
                named = [pattern for pattern, table in tables.items() if nth < table[chunk][stage]]
                assert patterns == ([] if view.full else named)


@given(settings())
def test_an_exclude_takes_nothing_from_a_layer_that_it_does_not_name(given_settings: dict[str, Any]) -> None:
    setting = LayerSetting(**given_settings)
    without = LayerSetting(**given_settings | {name: False for name in NAMES if "exclude" in name})
    named = frozenset().union(*setting.policy.select_exclude.values(), *setting.policy.comm_exclude.values())
    for layer in range(setting.layout.num_layers):
        if layer not in named:
            assert setting.for_layer(layer) == without.for_layer(layer)


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 9),
        st.integers(),
        st.floats(),
        st.text(max_size=6),
        st.binary(max_size=3),
        st.sampled_from([r"a\.b", "a.b", "(", r"[\.]", "(a+)+", "*", 10**40]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(), st.none()), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("num_layers", "pp", "pp_interleave_num", "offset", "recompute", *NAMES, "swap", "mp_comm_recompute"),
            ANYTHING,
        ),
    )
)
def test_whatever_the_settings_are_the_answer_is_a_setting_or_advice(anything: dict[str, Any]) -> None:
    try:
        setting = LayerSetting(**{"num_layers": 8, "pp": 2} | anything)
    except EvenloadError as error:
        where = error.where
    else:
        where = "$."
        assert setting.layout.num_layers == anything.get("num_layers", 8)
        assert all(str(notice) for notice in setting.notices)
        assert len(setting.log_lines()) >= 7
        assert setting.for_layer(0).layer == 0
    assert where is not None
    assert where.startswith("$.")


def test_the_flags_are_true_or_false() -> None:
    for name in ("parallel_optimizer_comm_recompute", "mp_comm_recompute", "recompute_slice_activation", "swap"):
        for value in (1, "yes", None):
            with pytest.raises(EvenloadError) as raised:
                LayerSetting(4, pp=2, **{name: value})
            assert raised.value.where == f"$.{name}"
    policy = LayerSetting(
        4,
        pp=2,
        parallel_optimizer_comm_recompute=True,
        mp_comm_recompute=False,
        recompute_slice_activation=True,
    ).policy
    assert (policy.optimizer_comm, policy.mp_comm, policy.slice_activation) == (True, False, True)


def test_sizes_are_named_as_mindformers_names_them() -> None:
    with pytest.raises(EvenloadError) as raised:
        LayerSetting(4, pp=2, pp_interleave_num=0)
    assert raised.value.where == "$.pp_interleave_num"


def test_wrong_input_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="must sum to 1"):
        LayerSetting(33, pp=4)


def test_the_view_shares_its_layout_with_the_rest_of_evenload() -> None:
    assert LayerSetting(30, pp=4, offset=[0, 1, 1, 0]).layout == Layout(((7, 8, 8, 7),))


def test_arrays_are_as_good_as_lists():
    counts = np.array([[1, 0], [0, 2]])
    setting = LayerSetting(8, pp=2, pp_interleave_num=2, offset=np.array([[1, -1], [0, 0]]), recompute=counts)
    assert (setting.layer_list, setting.layer_recompute) == ([[3, 1], [2, 2]], [[1, 0], [0, 2]])
    assert (counts == [[1, 0], [0, 2]]).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", np.array([4, 4])),
        ("pp", np.array([2, 2])),
        ("pp_interleave_num", np.array([0.5])),
        ("offset", np.zeros((2, 2, 2))),
        ("offset", np.array(["a", "b"])),
        ("recompute", np.zeros((1, 2, 2))),
        ("select_recompute", np.array([0.5, 1.0])),
    ],
)
def test_arrays_that_mean_nothing_are_refused(name, value):
    with pytest.raises(EvenloadError):
        LayerSetting(**({"num_layers": 4, "pp": 2} | {name: value}))
