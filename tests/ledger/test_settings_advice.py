"""The setting that a gap argues for, and never one that is on."""

import pytest

from evenload.ledger.curve import Peaks
from evenload.ledger.settings import read_alloc_conf
from evenload.ledger.settings_advice import advise
from evenload.units import GIB


def peaks(reserved):
    return Peaks(needed=9 * GIB, held=10 * GIB, reserved=reserved, at=0)


@pytest.mark.parametrize(
    ("origin", "conf", "says"),
    [
        ("recorded", None, "expandable_segments:True makes less of it, unless it is on already"),
        ("recorded", "roundup_power2_divisions:4", "set expandable_segments:True"),
        ("recorded", "expandable_segments:True", "although segments can grow"),
        ("recorded", "expandable_segments:True,max_split_size_mb:64", "remove max_split_size_mb"),
        ("MindSpore memory tracker", None, "enable_vmm:True makes less of it"),
        ("MindSpore memory tracker", "MS_ALLOC_CONF=enable_vmm:True", "although segments can grow"),
    ],
)
def test_a_large_gap_argues_for_a_setting_that_is_not_on(origin, conf, says):
    text = advise(peaks(14 * GIB), origin, None if conf is None else read_alloc_conf(conf))
    assert text.startswith("4.00 GiB of what is reserved")
    assert says in text


def test_a_small_or_unknown_gap_argues_for_nothing():
    assert advise(peaks(10.5 * GIB), "recorded") is None
    assert advise(peaks(None), "recorded") is None
