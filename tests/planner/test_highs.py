import _thread
import threading
import time

import numpy as np
import pytest

from evenload.planner.highs import INFINITY, Row, Solver


def knapsack(items, seed=0):
    """Minimize the weight not packed, as one column above it."""
    rng = np.random.default_rng(seed)
    solver = Solver([*([1.0] * items), INFINITY], integers=range(items), seed=seed)
    solver.price(np.eye(items + 1)[items])
    for _ in range(5):
        weights = rng.integers(20, 100, items)
        solver.add([Row(columns=range(items), coefficients=weights.tolist(), upper=float(weights.sum() // 2))])
        gain = rng.integers(20, 100, items)
        solver.add([Row(columns=range(items + 1), coefficients=[*gain.tolist(), 1.0], lower=float(gain.sum()))])
    return solver


def test_the_relaxation_is_below_the_whole_solution():
    solver = knapsack(12)
    relaxed = solver.run(whole=False)
    whole = solver.run(whole=True, nodes=10_000)
    assert relaxed.solved
    assert whole.solved
    assert relaxed.bound < whole.bound
    assert whole.values[-1] == pytest.approx(whole.bound)
    assert np.rint(whole.values[:-1]) == pytest.approx(whole.values[:-1], abs=1e-6)


def test_no_solution_is_a_bound_of_infinity():
    solver = knapsack(8)
    solver.limit(8, 0.0)
    outcome = solver.run(whole=True, nodes=10_000)
    assert outcome.values is None
    assert outcome.bound == INFINITY


def test_the_node_limit_ends_a_run_with_a_bound_that_holds():
    best = knapsack(40).run(whole=True, nodes=10**6)
    few = knapsack(40).run(whole=True, nodes=1)
    assert few.nodes <= 10
    assert few.bound <= best.bound + 1e-6


def test_the_solver_prints_nothing(capfd):
    knapsack(10).run(whole=True, nodes=100)
    assert capfd.readouterr() == ("", "")


def test_the_same_seed_gives_the_same_solution():
    first, second = (knapsack(30).run(whole=True, nodes=50) for _ in range(2))
    assert (first.values == second.values).all()
    assert (first.bound, first.nodes) == (second.bound, second.nodes)


def test_rows_take_new_bounds():
    solver = knapsack(10)
    before = solver.run(whole=False).bound
    first = solver.rows
    solver.add([Row(columns=range(10), coefficients=[1.0] * 10)])
    assert solver.run(whole=False).bound == pytest.approx(before)
    solver.bound_rows(first, np.zeros(1), np.ones(1))
    assert solver.run(whole=False).bound > before


def test_ctrl_c_stops_the_solver():
    solver = knapsack(120, seed=5)
    threading.Timer(0.3, _thread.interrupt_main).start()
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        solver.run(whole=True, nodes=10**8)
    assert time.perf_counter() - began < 30
