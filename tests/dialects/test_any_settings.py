"""Whatever stands in a settings file: a plan that every writer can take, or one clear error with a place."""

import copy
import json
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.dialects.detect import read_settings
from evenload.dialects.megatron_write import write_megatron
from evenload.dialects.mindformers_pynative_write import write_pynative
from evenload.dialects.mindformers_write import write_mindformers
from evenload.dialects.native import write_native
from evenload.dialects.torchtitan import write_torchtitan
from evenload.dialects.yaml_source import read_yaml
from evenload.errors import EvenloadError
from evenload.report.check import check_json, check_text

DATA = Path(__file__).parent.parent / "data" / "dialects"
NAMES = ("seed.yaml", "glm4_9b.yaml", "pynative.yaml", "telechat3_36b.yaml")
WRITERS = (write_native, write_mindformers, write_pynative, write_megatron, write_torchtitan)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from(
        [10**9, 10**30, 1.5, float("inf"), float("nan"), "", "auto", "0-3", "full", "None", "1f1b", "(", r"a\.b"]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text("ab.\\(", max_size=4), inner, max_size=2),
)


def paths(value, path=()):
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in entries:
        yield from paths(below, (*path, step))


def changed(value, path, new):
    head, *rest = path
    result = copy.copy(value)
    result[head] = changed(value[head], rest, new) if rest else new
    return result


def attempt(call):
    try:
        return call(), None
    except EvenloadError as error:
        return None, error


def read(text, name):
    with patch("evenload.dialects.detect.read_text", return_value=text):
        return read_settings(name)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(st.data())
def test_any_value_at_any_place_is_read_or_refused(name, data):
    content = read_yaml(DATA / name).data
    for _ in range(data.draw(st.integers(1, 2))):
        content = changed(content, data.draw(st.sampled_from(list(paths(content)))), data.draw(values))
    reading, error = attempt(lambda: read(json.dumps(content), name))
    if error is not None:
        assert error.where
        assert error.exit_code == 2
        return
    assert check_text(reading)
    json.dumps(check_json(reading))
    for writer in WRITERS:
        writing, error = attempt(lambda writer=writer: writer(reading.plan))
        assert writing.text if error is None else error.where
