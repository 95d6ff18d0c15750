import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.test_layout import layouts

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.policy import (
    DEFAULT_COMM,
    DEFAULT_SELECT,
    LayerPolicy,
    Policy,
    Recompute,
    as_counts,
    counts,
    covers,
    first_layers,
    recompute_units,
)


@given(layouts(), st.data())
def test_counts_of_the_first_layers_are_the_counts_within_each_chunk(layout: Layout, data: st.DataObject) -> None:
    table = tuple(tuple(data.draw(st.integers(-2, 12)) for _ in row) for row in layout.table)
    within = tuple(
        tuple(min(max(count, 0), held) for count, held in zip(*rows, strict=True))
        for rows in zip(table, layout.table, strict=True)
    )
    layers = first_layers(table, layout)
    assert counts(layers, layout) == within
    assert as_counts(layers, layout) == within


@given(layouts(), st.data())
def test_counts_stand_for_a_set_only_if_they_give_it_back(layout: Layout, data: st.DataObject) -> None:
    layers = frozenset(data.draw(st.sets(st.integers(0, layout.num_layers - 1))))
    if first_layers(counts(layers, layout), layout) == layers:
        assert as_counts(layers, layout) == counts(layers, layout)
    else:
        with pytest.raises(EvenloadError, match="are not the first"):
            as_counts(layers, layout)


def test_full_recompute_leaves_no_room_for_the_others() -> None:
    policy = Policy(full=frozenset({0}), select={"a": frozenset({0, 1})}, comm={"b": frozenset({0, 1})})
    assert policy.for_layer(0) == LayerPolicy(full=True)
    assert policy.for_layer(1) == LayerPolicy(select=("a",), comm=("b",))
    assert policy.for_layer(2) == LayerPolicy()


def test_an_exclude_acts_on_the_layers_it_names() -> None:
    policy = Policy(select={"a": frozenset({0, 1}), "b": frozenset({0, 1})}, select_exclude={"a": frozenset({1})})
    assert policy.for_layer(0) == LayerPolicy(select=("a", "b"))
    assert policy.for_layer(1) == LayerPolicy(select=("b",), select_exclude=("a",))


def test_an_exclude_with_nothing_left_to_exclude_from_is_not_in_force() -> None:
    policy = Policy(comm={"a": frozenset({0})}, comm_exclude={"a": frozenset({0, 1})})
    assert policy.for_layer(0) == policy.for_layer(1) == LayerPolicy()


def test_an_exclude_keeps_its_operators_under_full_recompute_too() -> None:
    policy = Policy(full=frozenset({0}), select_exclude={"a": frozenset({0, 1})})
    assert policy.for_layer(0) == LayerPolicy(full=True, select_exclude=("a",))
    assert policy.for_layer(1) == LayerPolicy()


@pytest.mark.parametrize(
    ("exclude", "pattern", "covered"),
    [
        (r"feed_forward\.mul", r"feed_forward\.mul", True),
        (r"feed_forward\.w.\.matmul", r"feed_forward\.w1\.matmul", True),
        (r".*\.norm", r"ffn_norm\.norm", True),
        (r"feed_forward\.w1\.matmul", r"feed_forward\.w.\.matmul", False),  # a wider pattern names more
        (r"feed_forward", r"feed_forward\.mul", False),  # another level
        (r"feed_forward\.mu", r"feed_forward\.mul", False),
        (r".*\.norm", r".+\.norm", False),  # two expressions: only the operators can tell
        (r".*\.norm", r".*\.norm", True),
    ],
)
def test_an_exclude_covers_what_it_names_level_for_level(exclude: str, pattern: str, covered: bool) -> None:
    assert covers(exclude, pattern) is covered


@given(st.lists(st.sampled_from(list(Recompute))))
def test_the_five_choices_are_what_each_layer_gets(choices: list[Recompute]) -> None:
    policy = Policy.of_choices(choices)
    assert [policy.for_layer(layer).choice for layer in range(len(choices))] == choices
    assert [policy.for_layer(layer) for layer in range(len(choices))] == [LayerPolicy.of(choice) for choice in choices]


def test_the_value_keeps_nothing_of_the_caller() -> None:
    layers, patterns = {0}, {}
    patterns["a"] = layers
    policy = Policy(full=layers, select=patterns)
    layers.add(1)
    patterns["b"] = {2}
    assert policy == Policy(full=frozenset({0}), select={"a": frozenset({0})})


def test_a_policy_prints_itself() -> None:
    policy = Policy(
        full=frozenset({0, 1, 4}), select={r"mlp\.mul": frozenset(range(8))}, comm_exclude={"b": frozenset({3})}
    )
    assert str(policy).splitlines() == ["full: 0-1,4", r"select mlp\.mul: 0-7", "communication, except b: 3"]
    assert str(Policy()) == "no recomputation"


def test_everywhere_means_every_layer() -> None:
    policy = Policy.everywhere(Recompute.BOTH, 3)
    assert set(policy.select) == set(DEFAULT_SELECT)
    assert set(policy.comm) == set(DEFAULT_COMM)
    assert all(layers == {0, 1, 2} for layers in (*policy.select.values(), *policy.comm.values()))


@given(st.integers(0, 200), st.integers(1, 50))
def test_recompute_units_take_every_layer_once(num_layers: int, group: int) -> None:
    units = recompute_units(num_layers, group)
    assert [layer for unit in units for layer in unit] == list(range(num_layers))
    assert all(len(unit) == group for unit in units[:-1])


@pytest.mark.parametrize("sizes", [(24, 0), (24, -1), (-1, 1), (24, 1.5), (True, 1)])
def test_units_of_no_layers_are_refused(sizes: tuple[object, object]) -> None:
    with pytest.raises(EvenloadError):
        recompute_units(*sizes)
