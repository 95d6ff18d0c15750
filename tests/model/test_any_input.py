"""Whatever a configuration holds, the answer is a model that makes sense or one clear error."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.small import SMALL
from tests.model.test_mindformers import DEEPSEEK_MOE, DEEPSEEK_V3, LLAMA2_7B

from evenload.errors import EvenloadError
from evenload.model import model_from_config, model_from_mindformers, open_model, read_config

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-10, 10**6)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["llama", "qwen3_moe", "gemma3", "full_attention", 10**4000])
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=5) | st.dictionaries(st.text(max_size=5), v, max_size=3))
KEYS = sorted({key for config in SMALL.values() for key in config} | {"text_config", "layer_types", "architectures"})


def assert_sensible(model) -> None:
    assert model.hidden > 0
    assert model.vocabulary > 0
    assert len(model.blocks) > 0
    assert all(size >= 0 for layer in model.layers for tensor in layer.tensors for size in tensor.shape)
    assert all(layer.parameters > 0 for layer in model.layers)
    for notice in model.notices:
        assert len(str(notice)) < 1000


def answer(read, *args, **kwargs) -> None:
    try:
        model = read(*args, **kwargs)
    except EvenloadError as error:
        text = str(error)
    else:
        assert_sensible(model)
        return
    assert 10 < len(text) < 1500


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(SMALL)), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3), st.booleans())
def test_a_configuration_with_wrong_values(name, changes, nested):
    config = SMALL[name] | changes
    answer(model_from_config, {"model_type": "gemma3", "text_config": config} if nested else config)


@settings(deadline=None)
@given(VALUES)
def test_anything_at_all(value):
    answer(model_from_config, value)
    answer(model_from_config, {"model_type": "llama", "text_config": value})


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(DEEPSEEK_V3 | DEEPSEEK_MOE | LLAMA2_7B)), VALUES, max_size=3), st.booleans()
)
def test_mindformers_settings_with_wrong_values(changes, deepseek):
    if deepseek:
        answer(model_from_mindformers, DEEPSEEK_V3 | changes, moe_config=DEEPSEEK_MOE)
    else:
        answer(model_from_mindformers, LLAMA2_7B | changes)


@settings(deadline=None)
@given(content=st.binary(max_size=60) | VALUES.map(repr).map(str.encode))
def test_any_file(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    answer(read_config, path)


@given(st.text(max_size=40))
def test_any_model_argument(text):
    answer(open_model, text)


def test_the_smallest_model_there_can_be():
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    model = model_from_config(json.loads(json.dumps({"model_type": "llama"} | dict.fromkeys(sizes, 1))))
    assert model.parameters == 1 + (4 + 3 + 2) + (1 + 1)
