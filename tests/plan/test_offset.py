import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import EvenloadError
from evenload.plan.offset import as_mindformers_reads, even_table, read_offset


def test_a_row_is_added_to_the_even_share_of_every_stage() -> None:
    assert read_offset(48, pp=5, offset=[0, 1, 1, 1, 0]) == ((9, 10, 10, 10, 9),)


def test_rows_are_added_interleave_by_interleave() -> None:
    offset = ((0, 1, 1, 1, 1), (1, 1, 1, 1, 0))
    assert read_offset(48, pp=5, interleave=2, offset=offset) == ((4, 5, 5, 5, 5), (5, 5, 5, 5, 4))


def test_a_row_that_sums_to_nothing_may_stand_for_every_interleave() -> None:
    assert read_offset(24, pp=2, interleave=3, offset=[1, -1]) == ((5, 3),) * 3


def test_zero_layers_in_a_chunk_are_accepted() -> None:
    assert read_offset(8, pp=4, offset=[6, -2, -2, -2]) == ((8, 0, 0, 0),)
    assert read_offset(3, pp=4, offset=[1, 1, 1, 0]) == ((1, 1, 1, 0),)


def test_a_wrong_sum_says_the_right_one_and_an_offset_that_works() -> None:
    with pytest.raises(EvenloadError) as raised:
        read_offset(61, pp=8, interleave=2)
    assert "must sum to 13" in raised.value.fact
    assert "61 mod 16" in raised.value.fact
    assert raised.value.fix == "offset: [[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]] works"


@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 4))
def test_the_suggested_offset_always_works(num_layers: int, pp: int, interleave: int) -> None:
    with pytest.raises(EvenloadError) as raised:
        read_offset(num_layers, pp=pp, interleave=interleave, offset=pp * interleave)
    suggested = eval(raised.value.fix.removeprefix("offset: ").removesuffix(" works"))
    table = read_offset(num_layers, pp=pp, interleave=interleave, offset=suggested)
    assert sum(map(sum, table)) == num_layers


@pytest.mark.parametrize(
    ("offset", "where", "words"),
    [
        (1, "$.offset", "changes each of the 4 chunks, 4 in all"),
        ([0, 0, 1], "$.offset", "3 entries for 4 stages"),
        ([0, 0, 0, 0, 1], "$.offset", "5 entries for 4 stages"),
        ([], "$.offset", "0 entries for 4 stages"),
        ([[0, 0, 0, 1], [0, 0, 0, 0]], "$.offset", "2 rows for 1 interleaves"),
        ([[0, 0, 1]], "$.offset[0]", "3 entries for 4 stages"),
        ([[0, 0, 0, [1]]], "$.offset[0][3]", "not a whole number"),
        ([0, 0, 0, None], "$.offset[3]", "not a whole number"),
        ([0, 0, 0, 1.0], "$.offset[3]", "not a whole number"),
        ([0, 0, 0, math.nan], "$.offset[3]", "not a whole number"),
        ([0, 0, 0, True], "$.offset[3]", "not a whole number"),
        ([0, 0, 0, "1"], "$.offset[3]", "not a whole number"),
        ([0, 0, 0, 10**9], "$.offset[3]", "beyond"),
        ([0, 0, 0, 10**6000], "$.offset[3]", "beyond"),
        ([10, -9, 0, 0], "$.offset[1]", "with -1 layers"),
        ({}, "$.offset", "not a whole number"),
        (None, "$.offset", "not a whole number"),
    ],
)
def test_what_is_no_offset_is_refused_with_its_place(offset: object, where: str, words: str) -> None:
    with pytest.raises(EvenloadError) as raised:
        read_offset(33, pp=4, offset=offset)
    assert raised.value.where == where
    assert words in raised.value.fact
    assert raised.value.fix


@pytest.mark.parametrize("rows", [[[0, 0, 0, 1], [0, 0, 1]], [0, [0, 0, 0, 1]], [[0, 0, 0, 0], 1]])
def test_ragged_rows_are_refused(rows: object) -> None:
    with pytest.raises(EvenloadError) as raised:
        read_offset(34, pp=4, interleave=2, offset=rows)
    assert raised.value.where.startswith("$.offset[")


def test_a_list_that_holds_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    for offset in (endless, as_mindformers_reads(endless)[0]):
        with pytest.raises(EvenloadError):
            read_offset(8, pp=1, offset=offset)


@pytest.mark.parametrize(
    ("sizes", "where"),
    [
        ({"num_layers": 0}, "$.num_layers"),
        ({"num_layers": -8}, "$.num_layers"),
        ({"num_layers": 8.0}, "$.num_layers"),
        ({"num_layers": True}, "$.num_layers"),
        ({"num_layers": "8"}, "$.num_layers"),
        ({"num_layers": 10**12}, "$.num_layers"),
        ({"pp": 0}, "$.pp"),
        ({"pp": -1}, "$.pp"),
        ({"pp": None}, "$.pp"),
        ({"interleave": 0}, "$.interleave"),
        ({"pp": 100_000, "interleave": 100_000}, "$.pp"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, object], where: str) -> None:
    with pytest.raises(EvenloadError) as raised:
        read_offset(**({"num_layers": 8, "pp": 4} | sizes))
    assert raised.value.where == where


@given(st.integers(1, 500), st.integers(1, 16), st.integers(1, 4))
def test_an_even_table_holds_every_layer_and_differs_by_one_at_most(num_layers: int, pp: int, interleave: int) -> None:
    table = even_table(num_layers, pp, interleave)
    flat = [count for row in table for count in row]
    assert (len(table), len(table[0])) == (interleave, pp)
    assert sum(flat) == num_layers
    assert max(flat) - min(flat) <= 1


def test_fractions_text_and_true_become_numbers_with_a_notice() -> None:
    offset, notices = as_mindformers_reads([0.9, "1", True, -0.5, 2.0, 3])
    assert offset == [0, 1, 1, 0, 2, 3]
    assert [notice.where for notice in notices] == [f"$.offset[{place}]" for place in range(4)]
    assert notices[0].fact == "0.9 is read as 0"


@pytest.mark.parametrize("entry", [math.nan, math.inf, "x", "1.5", None, b"1"])
def test_what_is_no_number_at_all_is_left_for_the_reader_to_refuse(entry: object) -> None:
    offset, notices = as_mindformers_reads([[entry]])
    assert not notices
    with pytest.raises(EvenloadError):
        read_offset(8, pp=1, offset=offset)
