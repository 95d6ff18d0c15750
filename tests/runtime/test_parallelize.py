"""`parallelize` for a loop of one's own, in one process: what it refuses."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.models import reference

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.runtime.launch import joined
from evenload.runtime.pipeline import parallelize
from evenload.setup import Setup

SETUP = Setup(pp=1, micro_batch=2, micro_batches=2, seq=16, dtype="fp32", schedule="gpipe")
PLAN = Plan(setup=SETUP, layout=Layout.from_counts([2]), policy=Policy())


@pytest.fixture(autouse=True)
def _alone():
    with joined(1, timeout=60):
        yield


def test_a_batch_that_is_not_the_plans_is_refused_before_anything_is_sent():
    pipeline, _ = parallelize(lambda: reference(2), PLAN)
    for tokens, target in (((5, 16), (5, 16)), ((8, 16), (8, 16)), ((4, 8), (4, 8)), ((4, 16), (2, 16))):
        given = torch.zeros(tokens, dtype=torch.int64), torch.zeros(target, dtype=torch.int64)
        with pytest.raises(EvenloadError, match=r"a step of this plan takes \(4, 16\): 2 micro-batches"):
            pipeline.step(*given)
    right = torch.zeros((4, 16), dtype=torch.int64)
    assert pipeline.step(right, right) is not None


def test_what_is_no_plan_and_no_number_of_steps_is_refused():
    with pytest.raises(EvenloadError, match="the plan is a str"):
        parallelize(lambda: reference(2), "plan.yaml")
    with pytest.raises(EvenloadError, match="accumulation is 0"):
        parallelize(lambda: reference(2), PLAN, accumulation=0)
