"""A settings file says itself which dialect it is in."""

from pathlib import Path

import pytest

from evenload.dialects.detect import read_settings
from evenload.errors import EvenloadError

DATA = Path(__file__).parent.parent / "data" / "dialects"
PLAN = "evenload: 1\nsetup: {pp: 2}\nlayout: [[2, 2]]\n"
ARGUMENTS = "--num-layers 8 \\\n--pipeline-model-parallel-size 2\n"


@pytest.mark.parametrize(
    ("name", "text", "dialect"),
    [
        ("a.yaml", PLAN, "evenload"),
        ("a.json", '{"setup": {"pp": 2}, "layout": [[2, 2]]}', "evenload"),
        ("a.yml", "recompute_config: {recompute: [1, 1]}\nmodel_config: {num_layers: 4}\n", "mindformers"),
        ("a", "model: {model_config: {num_layers: 4}}\n", "mindformers"),
        ("a.yaml", "parallelism: {pipeline_parallel: 2}\nmodel: {num_hidden_layers: 4}\n", "mindformers-pynative"),
        ("a.yaml", "pipeline_parallel: 2\nnum_hidden_layers: 4\n", "mindformers-pynative"),
        ("a.yaml", "recompute: {mode: None}\nmodel: {num_hidden_layers: 4}\n", "mindformers-pynative"),
        ("train.sh", ARGUMENTS, "megatron"),
        ("args.txt", ARGUMENTS, "megatron"),
    ],
)
def test_the_content_decides(tmp_path, name, text, dialect):
    file = tmp_path / name
    file.write_text(text)
    assert read_settings(file).dialect == dialect


def test_the_dialect_can_be_named(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(ARGUMENTS)
    assert read_settings(file, dialect="megatron").plan.layout.table == ((4, 4),)
    with pytest.raises(EvenloadError, match="there is no dialect 'megatorn'") as caught:
        read_settings(file, dialect="megatorn")
    assert caught.value.fix == "did you mean 'megatron'?"
    with pytest.raises(EvenloadError, match="the key 'parallel' is not known here"):
        read_settings(DATA / "seed.yaml", dialect="evenload")


@pytest.mark.parametrize(
    ("text", "fact", "fix"),
    [
        ('{"model_type": "llama", "num_hidden_layers": 4}', "this is a model's config.json", "evenload estimate"),
        ("recompute_conf: {recompute: True}\n", "neither an evenload plan", "did you mean 'recompute_config'?"),
        ("name: test\non: push\n", "neither an evenload plan nor MindFormers", "a settings file has one of"),
        ("just text\n", "the top level is a single value", None),
        ("", "the file is empty", None),
    ],
)  # fmt: skip
def test_other_files_are_refused_with_what_they_are(tmp_path, text, fact, fix):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(EvenloadError) as caught:
        read_settings(file)
    assert fact in caught.value.fact
    assert caught.value.where is not None
    assert caught.value.where.startswith(str(file))
    assert fix is None or (caught.value.fix is not None and fix in caught.value.fix)
