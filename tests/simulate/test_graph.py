import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulate.naive import naive_times

from evenload.errors import EvenloadError
from evenload.plan.schedule import SCHEDULES, Action, Op, actions
from evenload.simulate.graph import ActionGraph

RECORDED = json.loads((Path(__file__).parent.parent / "data" / "simulate" / "recorded_cases.json").read_text())


@st.composite
def graphs(draw, most=6):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    interleave = 1 if SCHEDULES[name].one_chunk else draw(st.integers(1, 3))
    return ActionGraph.scheduled(
        name, pp=draw(st.integers(1, most)), interleave=interleave, micro_batches=draw(st.integers(1, 9))
    )


def random_times(graph, seed, plans=1):
    rng = np.random.default_rng(seed)
    shape = (plans, graph.interleave, graph.pp)
    times = rng.choice([0.0, 1.0, 2.5], size=shape) if seed % 3 == 0 else rng.random(shape)
    return times, times * 2 + rng.random(shape)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["schedule"])
def test_recorded_step_times_are_reproduced(case):
    forward = np.array(case["forward"], dtype=float)
    backward = 2 * forward + np.array(case.get("recompute", 0.0 * forward))
    interleave, pp = forward.shape
    graph = ActionGraph.scheduled(case["schedule"], pp=pp, interleave=interleave, micro_batches=case["micro_batches"])
    assert graph.run(forward, backward).step_time == pytest.approx([case["expected"]["step_time"]], rel=1e-9)
    assert graph.step_times(forward, backward) == pytest.approx([case["expected"]["step_time"]], rel=1e-9)


@given(graph=graphs(), seed=st.integers(0, 10**6), transfer=st.sampled_from([0.0, 0.3, 5.0]))
def test_times_equal_those_of_a_naive_event_simulation(graph, seed, transfer):
    forward, backward = random_times(graph, seed)
    run = graph.run(forward[0], backward[0], transfer)
    naive = naive_times(graph.actions, forward[0], backward[0], transfer)
    flat = [(rank, action) for rank, order in enumerate(graph.actions) for action in order]
    assert run.start[0] == pytest.approx([naive[key][0] for key in flat], rel=1e-12)
    assert run.end[0] == pytest.approx([naive[key][1] for key in flat], rel=1e-12)
    assert run.step_time[0] == max(end for _, end in naive.values())


@given(graph=graphs(), seed=st.integers(0, 10**6), transfer=st.sampled_from([0.0, 0.7]))
def test_many_plans_at_once_equal_single_runs(graph, seed, transfer):
    forward, backward = random_times(graph, seed, plans=70)
    together = graph.step_times(forward, backward, transfer)
    run = graph.run(forward, backward, transfer)
    assert (run.step_time == together).all()
    for plan in (0, 63, 64, 69):
        single = graph.run(forward[plan], backward[plan], transfer)
        assert single.step_time[0] == together[plan]
        assert (single.start[0] == run.start[plan]).all()


@given(graph=graphs(), seed=st.integers(0, 10**6), transfer=st.sampled_from([0.0, 0.7]))
def test_the_critical_path_is_as_long_as_its_step_and_bounds_every_other_plan(graph, seed, transfer):
    forward, backward = random_times(graph, seed, plans=5)
    path = graph.critical_path(forward[0], backward[0], transfer)
    assert path.length(forward[0], backward[0], transfer) == pytest.approx(
        graph.step_times(forward[0], backward[0], transfer)[0], rel=1e-12
    )
    steps = graph.step_times(forward, backward, 2 * transfer)
    assert (path.length(forward, backward, 2 * transfer) <= steps * (1 + 1e-12)).all()


def test_the_critical_path_of_equal_stages_crosses_the_pipeline_and_runs_the_steady_state():
    graph = ActionGraph.scheduled("1f1b", pp=4, micro_batches=8)
    ones = np.ones((1, 4))
    path = graph.critical_path(ones, 2 * ones)
    assert path.forward.sum() == path.backward.sum() == 8 + 4 - 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 3), (2, 2), (4, 8), (4, 3), (8, 1), (6, 30)])
def test_equal_stages_wait_the_textbook_share(name, pp, micro_batches):
    graph = ActionGraph.scheduled(name, pp=pp, micro_batches=micro_batches)
    ones = np.ones((1, pp))
    step = graph.step_times(ones, 2 * ones)[0]
    assert step == 3 * (micro_batches + pp - 1)
    assert 1 - 3 * micro_batches / step == pytest.approx((pp - 1) / (micro_batches + pp - 1))


@pytest.mark.parametrize("interleave", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(interleave):
    graph = ActionGraph.scheduled("interleaved_1f1b", pp=4, interleave=interleave, micro_batches=8)
    chunk = np.full((interleave, 4), 1 / interleave)
    step = graph.step_times(chunk, 2 * chunk)[0]
    assert step == pytest.approx(3 * (8 + 3 / interleave))


def test_a_transfer_delays_only_what_crosses_ranks():
    graph = ActionGraph.scheduled("1f1b", pp=2, micro_batches=1)
    assert graph.step_times([[1.0, 1.0]], [[2.0, 2.0]], 0.5).tolist() == [1 + 0.5 + 1 + 2 + 0.5 + 2]
    alone = ActionGraph.scheduled("1f1b", pp=1, micro_batches=3)
    assert alone.step_times([[1.0]], [[2.0]], 0.5).tolist() == [9.0]


def test_no_plans_at_all_take_no_time():
    graph = ActionGraph.scheduled("1f1b", pp=2, micro_batches=3)
    assert graph.step_times(np.ones((0, 1, 2)), np.ones((0, 1, 2))).shape == (0,)
    assert graph.run(np.ones((0, 1, 2)), np.ones((0, 1, 2))).start.shape == (0, 12)


def test_the_graph_of_a_schedule_is_made_once():
    size = {"pp": 3, "micro_batches": 4}
    assert ActionGraph.scheduled("1f1b", **size) is ActionGraph.scheduled("Schedule1F1B", **size)


def test_a_list_that_cannot_run_is_refused():
    order = (Action(Op.FORWARD, 0, 0), Action(Op.BACKWARD, 0, 0), Action(Op.FORWARD, 0, 1), Action(Op.BACKWARD, 0, 1))
    late = tuple(order[index] for index in (0, 2, 1, 3))
    with pytest.raises(EvenloadError, match="cannot run"):
        ActionGraph.of((order, late)).step_times([[1.0, 1.0]], [[1.0, 1.0]])


def test_operations_may_be_written_as_letters():
    letters = tuple(
        tuple(Action(str(a.op), a.chunk, a.micro_batch) for a in order)
        for order in actions("1f1b", pp=2, micro_batches=3)
    )
    graph, same = ActionGraph.of(letters), ActionGraph.scheduled("1f1b", pp=2, micro_batches=3)
    times = ([[1.0, 2.0]], [[3.0, 5.0]])
    assert (graph.run(*times).end == same.run(*times).end).all()
    assert (graph.in_flight[0].held == same.in_flight[0].held).all()


@pytest.mark.parametrize("lists", [(), ((),), (actions("1f1b", pp=1, micro_batches=1)[0], ())])
def test_a_rank_without_actions_is_refused(lists):
    with pytest.raises(EvenloadError, match="no actions"):
        ActionGraph.of(lists).step_times(np.ones((1, len(lists))), np.ones((1, len(lists))))


def test_a_backward_in_two_parts_is_refused_where_times_are_asked_for():
    order = tuple(Action(op, 0, 0) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    with pytest.raises(EvenloadError, match="two parts"):
        ActionGraph.of((order,)).run([[1.0]], [[1.0]])


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        ([1.0, 1.0], "shape"),
        ([[1.0, 1.0, 1.0]], "shape"),
        ([[1.0], [1.0]], "shape"),
        ([[1.0, float("nan")]], "finite"),
        ([[1.0, float("inf")]], "finite"),
        ([[1.0, -1.0]], "not negative"),
        ([["a", "b"]], "numbers"),
        ([[1.0, None]], "finite"),
        ([[[1.0, 1.0]], [[1.0, 1.0]]], "2 plans"),
    ],
)
def test_wrong_times_are_refused(forward, says):
    graph = ActionGraph.of(actions("1f1b", pp=2, micro_batches=2))
    with pytest.raises(EvenloadError, match=says):
        graph.run(forward, [[1.0, 1.0]])


@pytest.mark.parametrize("transfer", [-1.0, float("nan"), float("inf")])
def test_a_wrong_transfer_time_is_refused(transfer):
    with pytest.raises(EvenloadError, match="transfer"):
        ActionGraph.scheduled("1f1b", pp=2, micro_batches=2).run([[1.0, 1.0]], [[1.0, 1.0]], transfer)


def test_a_critical_path_of_several_plans_is_refused():
    with pytest.raises(EvenloadError, match="one plan"):
        ActionGraph.scheduled("1f1b", pp=1, micro_batches=1).critical_path(np.ones((2, 1, 1)), np.ones((2, 1, 1)))
