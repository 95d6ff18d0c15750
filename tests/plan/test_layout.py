import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp, interleave = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 9), min_size=pp, max_size=pp)
    table = draw(st.lists(row, min_size=interleave, max_size=interleave).filter(lambda rows: any(map(any, rows))))
    return Layout(tuple(map(tuple, table)))


@given(layouts())
def test_every_layer_sits_in_exactly_one_chunk(layout: Layout) -> None:
    held = [layer for _, _, layers in layout.chunks() for layer in layers]
    assert held == list(range(layout.num_layers))
    assert sum(layout.per_stage) == layout.num_layers
    assert layout.accumulated[-1][-1] == layout.num_layers


@given(layouts())
def test_an_offset_gives_back_its_layout_and_a_layout_its_offset(layout: Layout) -> None:
    offset = layout.offsets()
    again = Layout.from_offset(layout.num_layers, pp=layout.pp, interleave=layout.interleave, offset=offset)
    assert again == layout
    assert again.offsets() == offset
    assert sum(map(sum, offset)) == layout.num_layers % (layout.pp * layout.interleave)


@given(layouts())
def test_the_place_of_a_layer_is_the_chunk_that_holds_it(layout: Layout) -> None:
    for chunk, stage, layers in layout.chunks():
        assert layout.layers(chunk, stage) == layers
        assert all(layout.place(layer) == (chunk, stage) for layer in layers)
    assert [layout.place(layer) for layer in range(layout.num_layers)] == list(
        zip(layout.chunks_of_layers(), layout.stages_of_layers(), strict=True)
    )


@given(layouts())
def test_stages_of_layers_give_back_a_layout_without_empty_chunks(layout: Layout) -> None:
    again = Layout.from_stages(layout.stages_of_layers(), pp=layout.pp)
    if layout.pp > 1 and all(map(all, layout.table)):
        assert again == layout
    assert again.per_stage == layout.per_stage
    assert again.stages_of_layers() == layout.stages_of_layers()


@given(st.integers(1, 500), st.integers(1, 16), st.integers(1, 4))
def test_an_even_layout_holds_every_layer(num_layers: int, pp: int, interleave: int) -> None:
    layout = Layout.even(num_layers, pp=pp, interleave=interleave)
    assert (layout.num_layers, layout.pp, layout.interleave) == (num_layers, pp, interleave)


def test_a_layer_outside_the_layout_has_no_place() -> None:
    layout = Layout.from_counts([2, 2])
    for layer in (-1, 4):
        with pytest.raises(EvenloadError, match="no layer"):
            layout.place(layer)
    for layer in (0.5, "0", True, None):
        with pytest.raises(EvenloadError, match="not a whole number"):
            layout.place(layer)


@pytest.mark.parametrize("table", [None, 4, "44", {}, (), ((),), ((1,), (1, 2)), (1, 2), ((1, -1),), ((1, 0.5),)])
def test_what_is_no_table_is_refused(table: object) -> None:
    with pytest.raises(EvenloadError):
        Layout(table)


def test_counts_may_be_one_row_or_one_row_a_chunk() -> None:
    assert Layout.from_counts([2, 3]) == Layout(((2, 3),))
    assert Layout.from_counts([[2, 3], (1, 0)]) == Layout(((2, 3), (1, 0)))


@pytest.mark.parametrize(
    "counts", [[], [[]], [[1], [1, 2]], [1, [2]], [-1, 2], [1.0], [True], [None], ["3"], "33", None, 5, {}]
)
def test_counts_that_are_none_are_refused(counts: object) -> None:
    with pytest.raises(EvenloadError):
        Layout.from_counts(counts)


def test_the_value_keeps_no_list_of_the_caller() -> None:
    rows = [[2, 3], [1, 4]]
    layout = Layout(rows)
    rows[0][0] = 99
    assert layout.table == ((2, 3), (1, 4))
    assert hash(layout) == hash(Layout(((2, 3), (1, 4))))


@pytest.mark.parametrize("stages", [[0, 2], [0, -1], [0, 0.5], [True]])
def test_stages_that_do_not_exist_are_refused(stages: list[object]) -> None:
    with pytest.raises(EvenloadError) as raised:
        Layout.from_stages(stages, pp=2)
    assert raised.value.where.startswith("$.stages[")


def test_a_layout_prints_itself_in_one_line() -> None:
    assert str(Layout(((7, 8, 8, 7),))) == "30 layers on 4 stages: 7 8 8 7"
    assert str(Layout(((4, 5), (5, 4)))) == "18 layers on 2 stages x 2 interleaves: 4 5 | 5 4"


def test_empty_chunks_are_said_once() -> None:
    assert Layout(((2, 2),)).notices() == ()
    (notice,) = Layout(((2, 0), (0, 1))).notices()
    assert notice.fact == "stage 1 of chunk 0 holds no layer (and 1 more)"
