"""Files of measured profiles: what is written is read, and nothing else is."""

import json

import pytest
from tests.profile.measuring import SETUP, measured

from evenload.errors import EvenloadError
from evenload.plan.policy import LayerPolicy
from evenload.profile.measured_file import load_measured, write_measured


@pytest.fixture
def path(tmp_path):
    write_measured(tmp_path / "measured.json", measured())
    return tmp_path / "measured.json"


def test_a_file_holds_the_whole_profile(path):
    read, own = load_measured(path), measured()
    assert (read.setup, read.conditions, read.times, read.chunk) == (own.setup, own.conditions, own.times, own.chunk)
    assert read.traced.graphs == own.traced.graphs
    policies = (LayerPolicy(), LayerPolicy(full=True), LayerPolicy(select=(r"act\.silu",)))
    for kind in own.times:
        costs = [one.profile(SETUP).kind(kind).cost for one in (read, own)]
        assert [costs[0](policy) for policy in policies] == [costs[1](policy) for policy in policies]


def test_a_file_is_not_written_over(path):
    with pytest.raises(EvenloadError, match="would be overwritten"):
        write_measured(path, measured())
    write_measured(path, measured(), force=True)


def _changed(data, *keys, to):
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (("evenload_profile",), 3, r"\$\.evenload_profile: this is version 3 .* reads 2"),
        (("evenload_profile",), 1, r"\$\.evenload_profile: this is version 1 .* reads 2"),
        (("evenload_profile",), True, "this is version true"),
        (("chunk", "forward", "median"), -1.0, r"\$\.chunk\.forward\.median"),
        (("chunk", "forward", "median"), "fast", r"expected.*\$\.chunk|\$\.chunk\.forward\.median"),
        (("times", "Block", "runs"), [], r"\$\.times\['Block'\]\.runs: there is no run without recomputation"),
        (("setup", "seq"), 0, "seq is 0"),
        (("traced", "graphs", "Block", "input"), "z", "unknown value 'z'"),
        (("traced", "held"), {}, r"\$\.traced\.held"),
        (("conditions", "device"), "abacus", r"\$\.conditions\.device"),
        (("bandwidth",), 0, r"\$\.bandwidth"),
    ],
)
def test_a_broken_file_is_refused_at_the_place(path, keys, value, says):
    data = json.loads(path.read_text())
    _changed(data, *keys, to=value)
    path.write_text(json.dumps(data))
    with pytest.raises(EvenloadError, match=says) as error:
        load_measured(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{}", "[]", "1", '{"layers_description": []}', '{"evenload_profile": 1}', "{"])
def test_what_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(EvenloadError):
        load_measured(tmp_path / "other.json")


def test_a_truncated_file_is_refused(path):
    path.write_text(path.read_text()[:-200])
    with pytest.raises(EvenloadError, match="not valid JSON"):
        load_measured(path)
