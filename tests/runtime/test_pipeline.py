"""Several processes on gloo: a pipelined, recomputed, uneven run is the run of one process."""

from __future__ import annotations

import pytest
import torch
from tests.processes import together
from tests.runtime import ranks
from tests.runtime.cases import DIVIDED, DIVIDED_PEAKS, EXACT, STARTS

pytestmark = pytest.mark.slow
LIMIT = 400
"""Seconds after which ranks that wait for each other are given up."""
LAYER = 4 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32)
"""Bytes of a layer: no collective is given more."""


def run_ranks(world: int, folder) -> list[dict]:
    return together(ranks.main, world, folder, world, str(folder), limit=LIMIT)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_ranks(4, tmp_path_factory.mktemp("four"))


def of_case(every: list[dict], name: str) -> list:
    for one in every:
        if isinstance(one[name], str) and one[name].startswith("Traceback"):
            pytest.fail(one[name])
    return [one[name] for one in every]


def check_exact(results: list[dict]) -> None:
    for result in results:
        assert result["loss"] == [True, True]
        assert result["differ"] == {}
    assert sorted(name for result in results for name in result["names"]) == results[0]["all"]


@pytest.mark.parametrize("name", [f"{kind} {table}" for kind, tables in EXACT[2].items() for table in tables])
def test_two_ranks_have_the_gradients_of_one_process_to_the_bit(two, name):
    check_exact(of_case(two, name))


@pytest.mark.parametrize("name", [f"{kind} {table}" for kind, tables in EXACT[4].items() for table in tables])
def test_four_ranks_have_the_gradients_of_one_process_to_the_bit(four, name):
    check_exact(of_case(four, name))


def test_a_hugging_face_model_runs_as_it_is(two):
    check_exact(of_case(two, "hugging face"))


def test_breadth_first_adds_micro_batches_in_another_order(two):
    for result in of_case(two, "looped_bfs"):
        assert result["loss"] == [True, True]
        assert max(result["differ"].values()) < 1e-7


@pytest.mark.parametrize("place", ["at two ranks", "at one rank"])
def test_a_tied_embedding_gets_the_gradients_of_both_ends(two, place):
    results = of_case(two, f"tied {place}")
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert any(result["differ"] for result in results)  # both ends of one process add up micro-batch by micro-batch
    for result in results:
        assert result["loss"] == [True, True]
        assert set(result["differ"]) <= ends
        assert all(far is not None and far < 1e-7 for far in result["differ"].values())


def test_a_model_begins_the_same_under_every_plan(two):
    first, second = ({} | a | b for a, b in (of_case(two, "begins [6, 5]"), of_case(two, "begins in a v")))
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def test_a_tied_embedding_begins_the_same_at_both_ends(two):
    first, last = of_case(two, "begins tied")
    assert torch.equal(first["model.embed_tokens.weight"], last["lm_head.weight"])


@pytest.mark.parametrize(
    "name",
    ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v", "accumulated", "tied"],
)
def test_the_peak_of_every_rank_is_predicted_to_the_byte(two, name):
    for found in of_case(two, f"peaks {name}"):
        first, later = found["predicted"]
        assert found["measured"] == [first, later, later]


@pytest.mark.parametrize("name", DIVIDED_PEAKS[2])
def test_the_peak_of_layers_that_are_divided_is_predicted(two, name):
    check_peaks(of_case(two, f"peaks {name}"))


@pytest.mark.parametrize("name", DIVIDED_PEAKS[4])
def test_the_peak_of_stages_that_are_divided_further_is_predicted(four, name):
    check_peaks(of_case(four, f"peaks {name}"))


def check_peaks(results: list[dict]) -> None:
    """To the byte, unless gloo's thread lets go of what a collective was given a moment later than the rank goes on."""
    for found in results:
        first, later = found["predicted"]
        before, *after = found["measured"]
        assert first <= before <= first + LAYER
        assert later <= min(after) <= 1.005 * later
        assert max(after) <= later + LAYER


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too few processes", "the plan is for 4 processes with pp 4, and 2 run"),
        ("another model", "the plan places 12 layers, the model has 11"),
        ("too few micro-batches", "1f1b cannot run so: it needs as many micro-batches as stages, 2, and has 1"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(two, name, says):
    messages = of_case(two, name)
    assert all(says in message for message in messages)
    assert any("fix:" in message for message in messages)  # the others name the rank that knows


@pytest.mark.parametrize("name", DIVIDED)
def test_stages_may_be_divided_further(four, name):
    results = of_case(four, name)
    for result in results:
        assert result["loss"] < 1e-5
        assert result["gradients"] < 1e-5
        assert result["norm"] == pytest.approx(1.0, abs=1e-5)
    whole = 96 * 32 * 2 + 32 + 5 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32)
    held = sum(result["held"] for result in results)
    assert whole <= held < 1.1 * whole  # norms are whole on every rank of tensor parallelism


@pytest.mark.parametrize("name", STARTS)
def test_divided_chunks_begin_as_the_whole_model_would_and_are_never_whole(four, name):
    for found in of_case(four, f"starts {name}"):
        assert found["differ"] == []
        assert found["held"] < found["peak"] <= found["held"] + found["largest"] + 2**15


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("uneven vocabulary", "tp 2 does not divide the 97 rows of the"),
        ("tied at one rank", "is used at both ends of the model, which zbv puts on one rank"),
        ("zero 1", "zero is 1"),
    ],
)
def test_a_division_that_cannot_be_is_refused_on_all_ranks(four, name, says):
    messages = of_case(four, name)
    assert all(says in message for message in messages)
    assert sum("fix:" in message for message in messages) >= 1
