"""Samples as people write them down."""

import pytest

from evenload.errors import EvenloadError
from evenload.ledger.series import Series, Trend, judge
from evenload.ledger.series_files import looks_like_series, series_in
from evenload.units import GIB, MIB


def read(text):
    return series_in(text, place="samples.json")


def test_numbers_with_a_unit_are_samples_between_steps():
    text = '{"MiB": [1, 2.5], "event": "after each save", "device_GiB": 80}'
    assert looks_like_series(text)
    assert read(text) == Series(baseline=(MIB, 2.5 * MIB), event="after each save", capacity=80 * GIB)


def test_samples_may_be_named_by_their_steps():
    series = read('{"baseline_GB": {"0": 30, "500": 30}, "peak_GB": {"500": 34, "0": 33}}')
    assert series == Series(baseline=(30e9, 30e9), peak=(33e9, 34e9), at=(0, 500))
    assert read('{"unit": "GB", "peak": [1, 2], "steps": [5, 9]}') == Series(peak=(1e9, 2e9), at=(5, 9))
    assert read('{"bytes": [7, 8]}').baseline == (7, 8)


def test_names_of_counters_are_understood():
    series = read('{"allocated_GB": [20, 21], "reserved_GB": [24, 30], "total_GB": 48}')
    assert series == Series(baseline=(20e9, 21e9), reserved=(24e9, 30e9), capacity=48e9)
    assert read('{"max_memory_allocated_MiB": [1, 2]}').peak == (MIB, 2 * MIB)
    assert read('{"rss_MiB": {"10": 1, "20": 2}}') == Series(baseline=(MIB, 2 * MIB), at=(10, 20))
    assert read('{"memory_GiB": [1, 2], "device_GiB": 8}') == Series(baseline=(GIB, 2 * GIB), capacity=8 * GIB)
    assert looks_like_series('{"reserved_GB": [1]}')


def test_other_json_is_not_taken_for_samples():
    for text in ('{"model_type": "llama"}', "[1, 2]", "{}", "step,MiB", '{"layers": [1]}'):
        assert not looks_like_series(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "JSON object"),
        ('{"MiB": [1], "colour": 3}', "'colour' is no name of samples"),
        ('{"baseline": [1]}', "no unit"),
        ('{"MiB": ["x"]}', "no amount of memory"),
        ('{"MiB": [-1]}', "no amount of memory"),
        ('{"MiB": [true]}', "no amount of memory"),
        ('{"MiB": {"a": 1}}', "no number of a step"),
        ('{"MiB": [1], "steps": "x"}', "steps are a list"),
        ('{"MiB": [1], "allocated_GB": [2]}', "two names of one thing"),
        ('{"MiB": [1', "not valid JSON"),
    ],
)
def test_samples_that_make_no_sense_are_wrong_input(text, says):
    with pytest.raises(EvenloadError, match=says):
        read(text)


def test_a_last_sample_without_a_step_stands_at_the_end():
    read = series_in('{"peak_GB": {"0": 33, "500": 34}, "end": 80, "facts": "uneven routing"}', place="a.json")
    assert read.peak == (33e9, 34e9, 80e9)
    assert read.at == ()
    read = series_in('{"baseline_GB": [30, 30, 30], "peak_GB": {"0": 33, "500": 34}, "end": 80}', place="a.json")
    assert judge(read).trend is Trend.IMBALANCE
    with pytest.raises(EvenloadError, match="no amount of memory"):
        series_in('{"peak_GB": [1, 2], "end": "late"}', place="a.json")
