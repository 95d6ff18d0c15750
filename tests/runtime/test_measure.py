"""Layers measured for real; what one process measures is tested with `evenload profile`."""

from evenload.plan.policy import Recompute


def test_two_processes_measure_together_and_send(both):
    (processes, sent, block), other = both("profiled")
    assert processes == 2
    assert 0 < sent < 1
    assert block == other[2]  # the samples of both
    assert [run.policy.choice for run in block.runs] == [Recompute.NONE, Recompute.SELECT, Recompute.FULL]
    assert all(run.backward.low <= run.backward.median <= run.backward.high for run in block.runs)
