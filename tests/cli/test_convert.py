"""`evenload convert`: one plan in the words of several programs."""

import json
import tomllib
from pathlib import Path

import pytest

from evenload.cli.main import main
from evenload.dialects.detect import read_settings

DATA = Path(__file__).parent.parent / "data" / "dialects"


def convert(capsys, file, *options):
    code = main(["convert", str(file), *options])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("target", ["evenload", "mindformers", "mindformers-pynative", "megatron"])
def test_what_is_written_is_read_back_with_the_same_layers(capsys, tmp_path, target):
    out = tmp_path / "deep" / ("train.sh" if target == "megatron" else "settings.yaml")
    code, said, err = convert(capsys, DATA / "seed.yaml", "--to", target, "--out", str(out))
    assert (code, said) == (0, "")
    assert err.endswith(f"wrote {out}\n")
    assert read_settings(out).plan.layout.table == ((4, 5, 5, 5, 5), (5, 5, 5, 5, 4))
    if target == "evenload":
        assert read_settings(out).plan == read_settings(DATA / "seed.yaml").plan


def test_torchtitan_settings_are_toml(capsys):
    code, out, err = convert(capsys, DATA / "glm4_9b.yaml", "--to", "torchtitan")
    assert code == 0
    parts = tomllib.loads(out)["parallelism"]["module_fqns_per_model_part"]
    assert [len([name for name in part if name.startswith("layers.")]) for part in parts] == [9, 10, 12, 9]
    assert "lost: $.policy.full: torchtitan checkpoints every layer or none" in err
    assert main(["convert", str(DATA / "glm4_9b.yaml"), "--to", "torchtitan-python"]) == 0
    assert "activation_checkpoint=ActivationCheckpointConfig(" in capsys.readouterr().out


def test_what_the_target_cannot_say_is_named_on_stderr(capsys):
    _, out, err = convert(capsys, DATA / "glm4_9b.yaml", "--to", "megatron")
    assert "--pipeline-model-parallel-layout 'Et*9|t*10|t*12|t*9L'" in out
    assert "lost: $.policy.full: Megatron-LM has one recompute count: the plan's [6, 3, 2, 3] becomes" in err
    assert "lost" not in out


def test_a_plan_goes_into_a_file_that_is_there(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    assert convert(capsys, DATA / "glm4_9b.yaml", "--to", "evenload", "--out", str(plan))[0] == 0
    plan.write_text(plan.read_text().replace("  - [9, 10, 12, 9]", "  - [10, 10, 10, 10]"))
    code, out, _ = convert(capsys, plan, "--to", "mindformers", "--into", str(DATA / "glm4_9b.yaml"))
    assert code == 2, "layers 9-11 are no longer the first of their stage"
    plan.write_text(plan.read_text().replace("full: '0-5,9-11,19-20,31-33'", "full: '0-3,10-11'"))
    code, out, _ = convert(capsys, plan, "--to", "mindformers", "--into", str(DATA / "glm4_9b.yaml"))
    assert code == 0
    before = (DATA / "glm4_9b.yaml").read_text().splitlines()
    after = out.splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [
        ("    offset: [-1, 0, 2, -1]", "    offset: 0"),
        ("  recompute: [6, 3, 2, 3]", "  recompute: [4, 2, 0, 0]"),
    ]


def test_nothing_is_overwritten_without_force(capsys, tmp_path):
    out = tmp_path / "a.yaml"
    out.write_text("mine")
    code, _, err = convert(capsys, DATA / "seed.yaml", "--to", "evenload", "--out", str(out))
    assert code == 2
    assert "--force" in err
    assert out.read_text() == "mine"
    assert convert(capsys, DATA / "seed.yaml", "--to", "evenload", "--out", str(out), "--force")[0] == 0
    assert out.read_text().startswith("evenload: 1\n")


def test_wrong_usage_exits_2(capsys):
    assert convert(capsys, DATA / "seed.yaml")[0] == 2
    assert convert(capsys, DATA / "seed.yaml", "--to", "jax")[0] == 2
    code, _, err = convert(capsys, DATA / "seed.yaml", "--to", "megatron", "--into", "x.yaml")
    assert code == 2
    assert "--into says nothing with --to megatron" in err


def test_json_holds_the_text_and_what_is_lost(capsys):
    code, out, err = convert(capsys, DATA / "glm4_9b.yaml", "--to", "megatron", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert "--recompute-num-layers 6" in answer["text"]
    assert answer["out"] is None
    assert [loss["where"] for loss in answer["losses"]] == ["$.policy.full"]
    assert all(set(said) == {"fact", "where", "fix"} for said in (*answer["losses"], *answer["warnings"]))


def test_mtp_layers_of_the_model_are_placed(capsys, tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text("parallel_config: {pipeline_stage: 4}\nmodel_config: {num_layers: 61, offset: [1, 0, 0, 0]}\n")
    code, out, _ = convert(capsys, settings, "--to", "megatron", "--model", "deepseek-v3")
    assert code == 0
    assert "--pipeline-model-parallel-layout 'Et*16|t*15|t*15|t*15mL'" in out


DESCRIBED = """
parallel_config: {pipeline_stage: 2, micro_batch_num: 4}
model:
  model_config: {type: LlamaConfig, num_layers: 4, hidden_size: 64, num_heads: 4, vocab_size: 256, seq_length: 128}
"""


def test_a_plan_remembers_its_model_wherever_it_is_read(capsys, tmp_path, monkeypatch):
    settings = tmp_path / "settings.yaml"
    settings.write_text(DESCRIBED)
    plan = tmp_path / "plans" / "plan.yaml"
    monkeypatch.chdir(tmp_path)
    assert convert(capsys, "settings.yaml", "--to", "evenload", "--out", "plans/plan.yaml")[0] == 0
    assert read_settings(plan).plan.model == "../settings.yaml"
    assert main(["estimate", "settings.yaml", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    monkeypatch.chdir("/")
    for verb in ("estimate", "simulate", "names"):
        assert main([verb, str(plan), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert verb != "estimate" or said["stages"] == stages


def test_a_plan_is_made_for_the_model_that_is_named(capsys, tmp_path):
    arguments = tmp_path / "train.sh"
    arguments.write_text("--num-layers 32 --pipeline-model-parallel-size 4")
    code, out, _ = convert(capsys, arguments, "--to", "evenload", "--model", "Llama-3-8B")
    assert (code, "model: llama-3-8b\n" in out) == (0, True)
    assert "model: null\n" in convert(capsys, arguments, "--to", "evenload")[1]


def test_mtp_layers_of_the_model_that_a_plan_names_are_placed(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("evenload: 1\nmodel: deepseek-v3\nsetup: {pp: 2}\nlayout: [[31, 30]]\n")
    assert "'Et*31|t*30mL'" in convert(capsys, plan, "--to", "megatron")[1]


@pytest.mark.parametrize("verb", [["check"], ["convert", "--to", "megatron"]])
def test_a_model_with_other_layers_than_the_settings_is_refused(capsys, tmp_path, verb):
    arguments = tmp_path / "train.sh"
    arguments.write_text("--num-layers 8 --pipeline-model-parallel-size 4")
    assert main([verb[0], str(arguments), *verb[1:], "--model", "llama-3-8b"]) == 2
    assert "train.sh: the settings place 8 layers, llama-3-8b has 32" in capsys.readouterr().err
