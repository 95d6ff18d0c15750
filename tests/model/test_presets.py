import json
from pathlib import Path

import pytest

from evenload.errors import EvenloadError
from evenload.model import model_source, open_model, preset, preset_names
from evenload.model.presets import _configs

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
PUBLISHED = {
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "gemma-2-27b": 27_227_128_320,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "phi-4": 14_659_507_200,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
}
"""Parameters that the publishers' weight files hold."""


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_preset_has_as_many_parameters_as_the_published_weights(name, parameters):
    assert preset(name).parameters == parameters


def test_no_preset_relies_on_an_assumption_or_holds_a_key_that_nobody_reads():
    for name in preset_names():
        model = preset(name)
        assert model.notices == ()
        assert model.ignored == ()
        assert model.name == name


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir()))
def test_the_shipped_examples_and_the_presets_are_the_same_models(name):
    example = open_model(str(EXAMPLES / name))
    assert example.layers == preset(name).layers
    assert example.name == name
    shipped, full = _configs()[name], json.loads((EXAMPLES / name / "config.json").read_text())
    assert all(full[key] == value for key, value in shipped.items() if key in full)


def test_case_does_not_matter():
    assert preset(" Llama-3-8B ") == preset("llama-3-8b")


@pytest.mark.parametrize(("wrong", "right"), [("llama-3-8", "llama-3-8b"), ("qwen3_32b", "qwen3-32b")])
def test_a_misspelt_preset_gets_a_suggestion(wrong, right):
    for read in (preset, open_model):
        with pytest.raises(EvenloadError) as caught:
            read(wrong)
        assert right in caught.value.fix


def test_a_repository_name_is_not_downloaded_and_the_message_says_so():
    with pytest.raises(EvenloadError, match="nothing is downloaded") as caught:
        open_model("meta-llama/Llama-3.1-8B")
    assert "llama-3.1-8b" in caught.value.fix


def test_a_directory_a_file_and_a_preset_are_told_apart(tmp_path, monkeypatch):
    config = (EXAMPLES / "llama-3-8b" / "config.json").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(config)
    (tmp_path / "small.json").write_text(config)
    (tmp_path / "settings.yaml").write_text("parallel_config: {}\n")
    monkeypatch.chdir(tmp_path)
    assert open_model("mine").name == open_model("mine/config.json").name == "mine"
    assert open_model("small.json").name == "small"
    assert [model_source(text) for text in ("mine", "small.json", "llama-3-8b", "settings.yaml", "pkg.mod:build")] == [
        *("config", "config", "preset", "settings", "module"),
    ]


@pytest.mark.parametrize(
    "text",
    ["", "  ", "no/such/config.json", "nope.json", "nope.yaml", "a\0b", "x" * 5000, "/", "pkg.mod:build", "--pp"],
)
def test_what_is_no_model_is_refused_with_a_fix(text):
    with pytest.raises(EvenloadError) as caught:
        open_model(text)
    assert caught.value.fix
    assert caught.value.exit_code == 2


def test_a_settings_file_is_left_to_its_own_reader(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("model: {}\n")
    with pytest.raises(EvenloadError, match="settings file"):
        open_model(str(path))
