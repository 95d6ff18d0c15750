import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.test_layout import layouts

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT
from evenload.plan.recompute_lists import RecomputeLists, read_recompute_lists

FOUR = Layout(((4, 4, 4, 4),))
THREE_ROUNDS = Layout(((2, 3, 2, 2), (2, 2, 3, 2), (2, 2, 2, 3)))


def full(layout: Layout, value: object) -> tuple[tuple[int, ...], ...]:
    return read_recompute_lists(layout, recompute=value).full.table


def facts(lists: RecomputeLists) -> list[str]:
    return [notice.fact for notice in lists.notices]


@given(layouts(), st.booleans())
def test_true_is_every_layer_and_false_is_none(layout: Layout, value: bool) -> None:
    lists = read_recompute_lists(layout, recompute=value)
    assert lists.full.layers == (set(range(layout.num_layers)) if value else set())
    assert lists.notices == ()


@given(layouts(), st.data())
def test_counts_per_stage_are_dealt_evenly_from_the_first_interleave(layout: Layout, data: st.DataObject) -> None:
    value = [data.draw(st.one_of(st.booleans(), st.integers(0, 40))) for _ in range(layout.pp)]
    table = full(layout, value)
    for stage, (entry, held) in enumerate(zip(value, zip(*layout.table, strict=True), strict=True)):
        dealt = [row[stage] for row in table]
        wanted = (sum(held) if entry else 0) if isinstance(entry, bool) else min(entry, sum(held))
        assert sum(dealt) == wanted
        for chunk, count in enumerate(dealt):
            for later in range(chunk + 1, len(dealt)):
                assert count >= dealt[later] or count == held[chunk]  # an earlier interleave is never behind
                assert dealt[later] >= count - 1 or dealt[later] == held[later]  # and never ahead by more than one


@given(layouts(), st.data())
def test_counts_per_chunk_are_capped_at_its_layers(layout: Layout, data: st.DataObject) -> None:
    entry = st.one_of(st.booleans(), st.integers(-3, 12))
    row = st.lists(entry, min_size=layout.pp, max_size=layout.pp)
    value = [data.draw(row) for _ in range(layout.interleave)]
    lists = read_recompute_lists(layout, recompute=value)
    for chunk, stage, held in layout.chunks():
        written = value[chunk][stage]
        wanted = (len(held) if written else 0) if isinstance(written, bool) else min(written, len(held))
        assert lists.full.table[chunk][stage] == wanted
        assert lists.full.layers.intersection(held) == set(held[: max(0, wanted)])


def test_true_and_false_stand_for_a_whole_row_too() -> None:
    assert full(THREE_ROUNDS, [True, [1, 0, 1, 0], False]) == ((2, 3, 2, 2), (1, 0, 1, 0), (0, 0, 0, 0))


def test_a_list_of_true_and_false_is_one_entry_a_stage_even_where_it_has_as_many_rows() -> None:
    layout = Layout(((2, 2), (2, 2)))
    assert full(layout, [True, False]) == ((2, 0), (2, 0))


def test_tuples_mean_what_lists_mean() -> None:
    assert full(FOUR, (1, True, False, 3)) == full(FOUR, [1, True, False, 3]) == ((1, 4, 0, 3),)
    assert full(THREE_ROUNDS, ((9, 0, 2, 0), True, [2, 2, 2, 2])) == ((2, 0, 2, 0), (2, 2, 3, 2), (2, 2, 2, 2))


def test_counts_without_a_pattern_mean_the_default_patterns() -> None:
    lists = read_recompute_lists(FOUR, select_recompute=[1, 0, 0, 0], select_comm_recompute=True)
    assert {pattern: switched.table for pattern, switched in lists.select.items()} == dict.fromkeys(
        DEFAULT_SELECT, ((1, 0, 0, 0),)
    )
    assert list(lists.comm) == list(DEFAULT_COMM)


def test_a_list_of_patterns_means_every_layer_alone_and_as_a_value() -> None:
    alone = read_recompute_lists(FOUR, select_recompute=("a", "b"))
    value = read_recompute_lists(FOUR, select_recompute={"a": ["x"], "b": True})
    assert alone.select == value.select
    assert alone.select["a"].table == FOUR.table


@pytest.mark.parametrize("empty", [[], (), {}])
def test_empty_means_no_pattern_at_all(empty: object) -> None:
    lists = read_recompute_lists(FOUR, select_recompute=empty, select_recompute_exclude=empty)
    assert lists.select == lists.select_exclude == {}
    assert lists.notices == ()


def test_an_empty_value_means_no_layer() -> None:
    assert full(FOUR, []) == ((0, 0, 0, 0),)
    assert read_recompute_lists(FOUR, select_recompute={"a": []}).select["a"].layers == set()


def test_patterns_keep_the_order_of_the_settings() -> None:
    assert list(read_recompute_lists(FOUR, select_recompute={"b": True, "a": False}).select) == ["b", "a"]


def test_counts_above_what_a_chunk_holds_are_taken_as_all_and_said_once_a_list() -> None:
    lists = read_recompute_lists(FOUR, recompute=[9, 9, 4, 0], select_recompute={"a": [[5, 0, 0, 0]]})
    assert lists.full.table == ((4, 4, 4, 0),)
    assert [(notice.fact, notice.where) for notice in lists.notices] == [
        ("[0] asks for 9 layers, stage 0 has 4 (and 1 more such): all of them are taken", "$.recompute"),
        ("[0][0] asks for 5 layers, the chunk has 4: all of them are taken", "$.select_recompute['a']"),
    ]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (None, "$.recompute"),
        (3, "$.recompute"),
        (1.0, "$.recompute"),
        ("true", "$.recompute"),
        ({"a": True}, "$.recompute"),
        ([1, 1, 1, 1, 0], "$.recompute"),
        ([1.0, 2.0, 0.0, 0.0], "$.recompute[0]"),
        ([0, None, 0, 0], "$.recompute[1]"),
        ([0, "1", 0, 0], "$.recompute[1]"),
        ([0, 0, -1, 0], "$.recompute[2]"),
        ([0, 0, 10**30, 0], "$.recompute[2]"),
        ([[1, 2]], "$.recompute[0]"),
        ([[1, 2, 3, 4, 5]], "$.recompute[0]"),
        ([[]], "$.recompute[0]"),
        ([[1, 2, 3, 4], [1, 1, 1, 1]], "$.recompute"),
        ([[None, 0, 0, 0]], "$.recompute[0][0]"),
        ([[0.5, 0, 0, 0]], "$.recompute[0][0]"),
        ([[["a"], 0, 0, 0]], "$.recompute[0][0]"),
    ],
)
def test_what_means_nothing_is_refused_with_its_place(value: object, where: str) -> None:
    with pytest.raises(EvenloadError) as raised:
        read_recompute_lists(FOUR, recompute=value)
    assert raised.value.where == where
    assert raised.value.fix


@pytest.mark.parametrize("value", [[1, [1, 1, 1, 1], [1, 1, 1, 1]], [[1, 1, 1, 1], [1, 1], [1, 1, 1, 1]]])
def test_rows_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(EvenloadError) as raised:
        read_recompute_lists(THREE_ROUNDS, recompute=value)
    assert raised.value.where.startswith("$.recompute[")


@pytest.mark.parametrize(
    "value", [None, 2, "feed_forward", ["a", 1], {"a": None}, {"a": {}}, {"a": 1}, {1: True}, ["("], {"a[": False}]
)
def test_what_names_no_operators_is_refused(value: object) -> None:
    with pytest.raises(EvenloadError) as raised:
        read_recompute_lists(FOUR, select_recompute=value)
    assert raised.value.where.startswith("$.select_recompute")


def test_flags_travel_with_the_policy() -> None:
    lists = read_recompute_lists(FOUR, recompute=True)
    assert (lists.policy().optimizer_comm, lists.policy().mp_comm, lists.policy().slice_activation) == (
        False,
        True,
        False,
    )
    policy = lists.policy(optimizer_comm=True, mp_comm=False, slice_activation=True)
    assert (policy.optimizer_comm, policy.mp_comm, policy.slice_activation) == (True, False, True)


def test_under_swap_numbers_are_layers() -> None:
    lists = read_recompute_lists(FOUR, recompute=[3, 5], select_recompute={"a": [0], "b": True}, layer_ids=True)
    policy = lists.policy()
    assert policy.full == {3, 5}
    assert policy.select == {"a": {0}, "b": set(range(16))}
    assert lists.full.table == ((1, 1, 0, 0),)
    assert facts(lists) == [
        "with swap on, the numbers are layers, not counts: layers 3,5",
        "with swap on, the numbers are layers, not counts: layers 0",
    ]


@pytest.mark.parametrize("value", [[16], [-1], [True], [[1, 1, 1, 1]], [0.5]])
def test_under_swap_what_is_no_layer_is_refused(value: object) -> None:
    with pytest.raises(EvenloadError) as raised:
        read_recompute_lists(FOUR, recompute=value, layer_ids=True)
    assert raised.value.where == "$.recompute[0]"
