"""The optimizer of one rank."""

from __future__ import annotations

from evenload.runtime.optimizer import make_optimizer
from evenload.runtime.settings import RunSettings


def test_a_rank_that_holds_no_parameters_has_an_optimizer_that_does_nothing():
    optimizer = make_optimizer([], RunSettings())
    optimizer.step()
    assert not optimizer.state
