"""The time of a step: the median after the first few, beside what was predicted for the same conditions."""

from dataclasses import replace

import pytest
import torch
from tests.profile.measuring import SETUP, measured

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.runtime.pace import FIRST, Pace, predicted_step
from evenload.runtime.settings import RunSettings
from evenload.simulate.timeline import simulate

PLAN = Plan(setup=replace(SETUP, micro_batches=3), layout=Layout(((3,),)), policy=Policy())
RUN = RunSettings(implementation="reference")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_the_first_steps_do_not_count():
    pace = Pace(1.0)
    for _ in range(FIRST):
        pace.step(100.0)
    assert "too few steps" in str(pace.found)
    for seconds in (1.0, 1.1, 1.2, 9.0):
        pace.step(seconds)
    assert (pace.found.measured, pace.found.steps) == (pytest.approx(1.15), 4)
    assert pace.found.error == pytest.approx(0.15)
    assert "predicted 1000 ms, measured 1150 ms (median of 4 steps" in str(pace.found)
    assert str(pace.found).endswith("+15.0%")


def test_an_accumulated_step_updates_once():
    timeline = simulate(measured().profile(PLAN.setup), PLAN)
    update = 2 * 0.001 + 3 * 0.003
    for parts in (1, 2):
        found = predicted_step(measured(), PLAN, replace(RUN, accumulation=parts), own=False)
        assert found == pytest.approx(parts * timeline.step_time + update)


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        ({"threads": 2}, "the number of threads is 1, but the profile was measured with 2"),
        ({"device": "cuda"}, "the device is cpu, but"),
        ({"code": "transformers"}, "the model's code is reference"),
        ({"autocast": "bf16"}, "autocast is off, but the profile was measured with bf16"),
        ({"adamw": "loop"}, "the form of AdamW is fused"),
    ],
)
def test_other_conditions_are_refused(conditions, says):
    profile = measured(conditions=replace(measured().conditions, **conditions))
    with pytest.raises(EvenloadError, match=says):
        predicted_step(profile, PLAN, RUN, own=False)
