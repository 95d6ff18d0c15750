"""Samples of memory over time, public reports among them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import EvenloadError
from evenload.ledger.series import Series, Trend, judge
from evenload.units import GIB, MIB


def test_growth_at_every_save_overflows_at_the_next_one():
    """axolotl-ai-cloud/axolotl#3596: memory after each checkpoint save of a fine-tuning."""
    series = Series(
        baseline=tuple(MIB * value for value in (49258, 61558, 76124)),
        event="after each checkpoint save",
        capacity=81559 * MIB,
    )
    judgement = judge(series)
    assert judgement.trend is Trend.GROWTH
    assert judgement.increments == (12300 * MIB, 14566 * MIB)
    assert judgement.next_overflows
    assert judgement.full_at == 3


def test_a_peak_that_drifts_over_a_flat_baseline_is_imbalance():
    """databricks/megablocks#154: dropless experts, the peak goes from 33 GB to 80 GB with the routing."""
    series = Series(baseline=(30e9, 30e9, 30e9, 30e9), peak=(33e9, 34e9, 52e9, 80e9), at=(0, 500, 1000, 1500))
    assert judge(series).trend is Trend.IMBALANCE
    assert judge(series).per_step == 0
    assert judge(Series(peak=series.peak)).trend is Trend.UNDECIDED


def test_steady_growth_has_its_rate_and_its_end():
    series = Series(baseline=tuple(10 * GIB + step * 64 * MIB for step in range(8)), capacity=12 * GIB)
    judgement = judge(series)
    assert judgement.per_step == 64 * MIB
    assert judgement.full_at == 32
    assert not judgement.next_overflows


def test_the_peak_decides_when_the_device_is_full():
    baseline = tuple(GIB + step * 64 * MIB for step in range(8))
    peak = tuple(level + GIB for level in baseline)
    assert judge(Series(baseline=baseline, peak=peak, capacity=3 * GIB)).full_at == 16


@pytest.mark.parametrize(
    "baseline",
    [
        (100,) * 9,
        (0, 100, 100, 100, 100, 100),
        (10, 60, 90, 100, 100, 100, 100, 100),
        (100, 140, 90, 130, 95, 135, 100),
        (100, 100.2, 100.4, 100.6),
        (500, 400, 300, 200),
        (8, 9, 9.5, 9.8, 9.9, 9.9),
        (100, 150, 200, 100, 150, 200, 100),
        (100, 200, 100, 200, 100, 200),
        (1000, 5000, 8000, 8000, 8001, 8000),
        (50, 50, 50, 80, 80, 80, 80, 80),
        (0, 0, 0),
    ],
)
def test_what_settles_swings_or_falls_does_not_grow(baseline):
    assert judge(Series(baseline=baseline)).trend is Trend.FLAT


@pytest.mark.parametrize(
    ("baseline", "per_step"),
    [
        ((100, 120, 140, 130, 150, 170, 160, 180, 200), 20),  # between falls of the collector
        ((10, 10, 10, 11, 11, 11, 12, 12, 12, 13), 3 / 9),  # at every third sample
        ((1000, 5000, 5100, 5200, 5300, 5400), 100),  # after a warm-up of one step
        ((1.0, 3.0, 5.0, 8.0, 8.1, 8.2, 8.3, 8.4, 8.5, 8.6), 0.1),  # of three
        ((10, 11, 13, 16, 20), 2.5),
    ],
)
def test_growth_of_any_shape_is_growth(baseline, per_step):
    found = judge(Series(baseline=baseline))
    assert found.trend is Trend.GROWTH
    assert found.per_step == pytest.approx(per_step)


def test_a_reservation_that_grows_over_flat_tensors_is_fragmentation():
    allocated, reserved = (20, 20.1, 20, 20.1), (24, 30, 37, 44)
    assert judge(Series(baseline=allocated, reserved=reserved)).trend is Trend.FRAGMENTATION
    assert judge(Series(baseline=allocated, reserved=(24, 25, 25, 25))).trend is Trend.FLAT
    assert judge(Series(baseline=(20, 24, 28, 32), reserved=reserved)).trend is Trend.GROWTH
    assert judge(Series(reserved=reserved)).trend is Trend.UNDECIDED


def test_one_sample_decides_nothing():
    assert judge(Series(baseline=(5,))).trend is Trend.UNDECIDED


@given(level=st.floats(1, 1e12), rate=st.floats(0.05, 10), count=st.integers(3, 40))
def test_any_steady_growth_is_found(level, rate, count):
    baseline = tuple(level * (1 + rate * step) for step in range(count))
    assert judge(Series(baseline=baseline)).trend is Trend.GROWTH


@pytest.mark.parametrize(
    "series",
    [
        Series(),
        Series(baseline=(1, float("nan"))),
        Series(baseline=(1, -2)),
        Series(peak=(1, float("inf"))),
        Series(baseline=(1, 2), at=(1,)),
        Series(baseline=(1, 2), at=(3, 3)),
    ],
)
def test_samples_that_make_no_sense_are_wrong_input(series):
    with pytest.raises(EvenloadError):
        judge(series)
