"""A thin door to HiGHS: rows and columns in, solution and bound out; deterministic and interruptible."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import highspy
import numpy as np

from evenload.planner.costs import Floats

INFINITY: Final = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One constraint: lower <= sum of coefficients * columns <= upper."""

    columns: Sequence[int]
    coefficients: Sequence[float]
    lower: float = -INFINITY
    upper: float = INFINITY


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run of the solver found."""

    values: Floats | None
    """A feasible solution, or None."""
    bound: float
    """No solution is below this; infinite where there is none at all."""
    solved: bool
    """The solver came to its end, not to a limit."""
    nodes: int


class _Quiet(highspy.Highs):
    """HiGHS without its banner on stdout, where the answer of the command line goes."""

    def enableCallbacks(self) -> None:  # noqa: N802  # the name is HiGHS's; its constructor calls it before it prints
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


class Solver:
    """A minimization over columns with bounds, to which rows can be added between runs.

    Work is limited by nodes, never by time, on one thread: the same input gives the same answer.
    """

    def __init__(self, upper: Sequence[float], *, integers: Sequence[int] = (), seed: int) -> None:
        """Columns 0 <= x <= upper; `integers` are whole when `run(whole=True)`."""
        self._highs: Any = _Quiet()
        self._stop = threading.Event()
        self._integers = np.array(integers, dtype=np.int32)
        self._columns = len(upper)
        for option, value in (
            ("threads", 1),
            ("random_seed", seed % 2**31),
            ("mip_rel_gap", 0.0),
            ("mip_abs_gap", 1e-6),
            ("mip_feasibility_tolerance", 1e-6),
        ):
            self._highs.setOptionValue(option, value)
        self._highs.addVars(len(upper), np.zeros(len(upper)), np.array(upper, dtype=np.float64))
        self._highs.cbMipInterrupt += self._interrupt
        self._highs.cbSimplexInterrupt += self._interrupt

    def add(self, rows: Sequence[Row]) -> None:
        """Add constraints."""
        if not rows:
            return
        starts = np.cumsum([0, *(len(row.columns) for row in rows[:-1])])
        self._highs.addRows(
            len(rows),
            np.array([row.lower for row in rows]),
            np.array([row.upper for row in rows]),
            sum(len(row.columns) for row in rows),
            starts.astype(np.int32),
            np.concatenate([np.asarray(row.columns, dtype=np.int32) for row in rows]),
            np.concatenate([np.asarray(row.coefficients, dtype=np.float64) for row in rows]),
        )

    @property
    def entries(self) -> int:
        """Rows times columns."""
        return self.rows * self._columns

    @property
    def rows(self) -> int:
        """Number of constraints."""
        return int(self._highs.getNumRow())

    def price(self, costs: Floats) -> None:
        """What is minimized: costs @ columns."""
        self._highs.changeColsCost(self._columns, np.arange(self._columns, dtype=np.int32), costs)

    def bound_rows(self, first: int, lower: Floats, upper: Floats) -> None:
        """Give constraints, from the number `first` on, other bounds."""
        rows = np.arange(first, first + len(lower), dtype=np.int32)
        self._highs.changeRowsBounds(len(rows), rows, lower, upper)

    def limit(self, column: int, upper: float) -> None:
        """Give a column another upper bound."""
        self._highs.changeColBounds(column, 0.0, upper)

    def run(self, *, whole: bool, nodes: int = 0) -> Outcome:
        """Solve.

        Args:
            whole: integer columns take whole values; else the relaxation is solved.
            nodes: limit on branch and bound nodes.

        Raises:
            KeyboardInterrupt: Ctrl-C; the solver has stopped by then.
        """
        kind = highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous
        self._highs.changeColsIntegrality(
            len(self._integers), self._integers, np.full(len(self._integers), int(kind), dtype=np.uint8)
        )
        self._highs.setOptionValue("mip_max_nodes", nodes)
        self._work()
        info, status = self._highs.getInfo(), self._highs.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Outcome(values=None, bound=INFINITY, solved=True, nodes=max(0, info.mip_node_count) if whole else 0)
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(self._highs.getSolution().col_value) if feasible else None
        solved = status == highspy.HighsModelStatus.kOptimal
        relaxed = float(info.objective_function_value) if solved else -INFINITY
        bound = float(info.mip_dual_bound) if whole else relaxed
        return Outcome(values=values, bound=bound, solved=solved, nodes=max(0, info.mip_node_count) if whole else 0)

    def _work(self) -> None:
        """Run in a second thread, so that Ctrl-C reaches this one while the solver works."""
        failure: list[BaseException] = []

        def work() -> None:
            try:
                self._highs.run()
            except BaseException as error:  # noqa: BLE001  # handed to the caller's thread
                failure.append(error)

        self._stop.clear()
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            while worker.is_alive():
                worker.join(0.1)
        except KeyboardInterrupt:
            self._stop.set()
            worker.join()
            raise
        if failure:
            raise failure[0]

    def _interrupt(self, event: Any) -> None:
        if self._stop.is_set():
            event.interrupt()
