import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulate.naive import naive_peak

from evenload.plan.schedule import SCHEDULES, Action, Op, actions, validate
from evenload.simulate.graph import ActionGraph
from evenload.simulate.inflight import in_flight

DATA = Path(__file__).parent.parent / "data" / "simulate"
COUNTS = json.loads((DATA / "in_flight_counts.json").read_text())
RECORDED = [case for case in json.loads((DATA / "recorded_cases.json").read_text()) if "kept" in case]


def test_1f1b_on_four_stages_holds_four_three_two_one():
    graph = ActionGraph.scheduled("1f1b", pp=4, micro_batches=8)
    assert [moments.fullest.tolist() for moments in graph.in_flight] == [[[4]], [[3]], [[2]], [[1]]]


def test_1f1b_holds_no_more_than_there_are_micro_batches():
    graph = ActionGraph.scheduled("1f1b", pp=4, micro_batches=2)
    assert [moments.fullest.tolist() for moments in graph.in_flight] == [[[2]], [[2]], [[2]], [[1]]]


def test_gpipe_holds_every_micro_batch_everywhere():
    graph = ActionGraph.scheduled("gpipe", pp=3, micro_batches=5)
    assert [moments.fullest.tolist() for moments in graph.in_flight] == [[[5]], [[5]], [[5]]]


@pytest.mark.parametrize("case", COUNTS, ids=str)
@pytest.mark.parametrize(
    ("key", "name"), [("interleaved", "interleaved_1f1b"), ("less_memory", "interleaved_1f1b_less_memory")]
)
def test_recorded_counts_are_among_the_fullest_moments(case, key, name):
    name = "1f1b" if case["interleave"] == 1 else name
    size = {word: case[word] for word in ("pp", "interleave", "micro_batches")}
    for rank, moments in enumerate(ActionGraph.scheduled(name, **size).in_flight):
        recorded = [row[rank] for row in case[key]]
        assert recorded in moments.fullest.tolist()
        assert moments.fullest.sum(axis=1).max() == sum(recorded)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["schedule"])
def test_recorded_peaks_are_reproduced(case):
    kept = np.array(case["kept"], dtype=float)
    interleave, pp = kept.shape
    graph = ActionGraph.scheduled(case["schedule"], pp=pp, interleave=interleave, micro_batches=case["micro_batches"])
    peaks = [
        case["static"][rank] + case["constant"] + (moments.fullest @ kept[:, rank]).max()
        for rank, moments in enumerate(graph.in_flight)
    ]
    assert peaks == pytest.approx(case["expected"]["peak"], rel=1e-9)


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    pp=st.integers(1, 6),
    interleave=st.integers(1, 3),
    micro_batches=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_the_highest_moment_is_the_highest_point_of_the_whole_step(name, pp, interleave, micro_batches, seed):
    interleave = 1 if SCHEDULES[name].one_chunk else interleave
    rng = np.random.default_rng(seed)
    kept, extra, backward = rng.random((3, interleave))
    orders = actions(name, pp=pp, interleave=interleave, micro_batches=micro_batches)
    for order in orders:
        moments = in_flight(order, interleave=interleave)
        level = moments.level(kept, kept + extra, backward).max()
        assert level == pytest.approx(naive_peak(order, kept, kept + extra, backward), rel=1e-12)
        without = moments.level(kept, kept, 0 * backward).max()
        assert without == pytest.approx((moments.fullest @ kept).max(), rel=1e-12)


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    pp=st.integers(1, 5),
    interleave=st.integers(1, 3),
    micro_batches=st.integers(1, 7),
    seed=st.integers(0, 10**6),
)
def test_gradients_come_to_be_in_the_first_backward_of_every_chunk(name, pp, interleave, micro_batches, seed):
    interleave = 1 if SCHEDULES[name].one_chunk else interleave
    rng = np.random.default_rng(seed)
    kept, extra, backward, more, born = rng.random((5, interleave))
    for order in actions(name, pp=pp, interleave=interleave, micro_batches=micro_batches):
        moments = in_flight(order, interleave=interleave, births=True)
        level = moments.level(kept, kept + extra, backward, first_backward_peak=born + more, born=born).max()
        peak = naive_peak(order, kept, kept + extra, backward, first_backward_peak=born + more, born=born)
        assert max(level, born.sum()) == pytest.approx(peak, rel=1e-12)
        usual = moments.level(kept, kept + extra, backward).max()
        assert usual == pytest.approx(in_flight(order, interleave=interleave).level(kept, kept + extra, backward).max())


def test_levels_of_many_plans_are_taken_at_once():
    moments = ActionGraph.scheduled("interleaved_1f1b", pp=2, interleave=2, micro_batches=4).in_flight[0]
    kept = np.arange(6.0).reshape(3, 2)
    together = moments.level(kept, kept, 0 * kept)
    assert together.shape == (3, len(moments.chunk))
    assert (together[1] == moments.level(kept[1], kept[1], 0 * kept[1])).all()


def test_a_schedule_of_all_forwards_first_with_a_split_backward_holds_every_chunk():
    """Two ranks, four chunks, eight micro-batches, backwards in pairs: valid, and 16 chunks in flight on each rank."""
    forwards = [Action(Op.FORWARD, chunk, index) for chunk in (0, 1) for index in range(8)]
    backwards = [
        Action(op, chunk, first + index)
        for first in range(0, 8, 2)
        for chunk in (1, 0)
        for index in (0, 1)
        for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    ]
    order = (*forwards, *backwards)
    size = {"pp": 2, "interleave": 2, "micro_batches": 8}
    assert len(order) == 48
    validate((order, order), **size)
    assert in_flight(order, interleave=2).fullest.sum(axis=1).max() == 16
    interleaved = ActionGraph.scheduled("interleaved_1f1b", **size)
    assert [moments.fullest.sum(axis=1).max() for moments in interleaved.in_flight] == [5, 3]
