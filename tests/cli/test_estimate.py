"""`evenload estimate` and `evenload names`: the JSON of the interface, the screen, the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from evenload.cli.main import main

from .process import environment

GIB = 2**30


def answer(capsys, *words, code=0):
    assert main(["estimate", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *words):
    assert main(["estimate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def test_every_stage_has_the_lines_of_the_interface(capsys):
    said = answer(capsys, "llama-3-8b", "--pp", "4", "--tp", "2", "--micro-batches", "8")
    assert [stage["rank"] for stage in said["stages"]] == [0, 1, 2, 3]
    assert [stage["layers"] for stage in said["stages"]] == [8, 8, 8, 8]
    assert said["limit"] is None
    assert said["fits"] is None
    for stage in said["stages"]:
        assert stage["peak_reserved"] is None
        assert stage["static"] == stage["parameters"] + stage["gradients"] + stage["optimizer"]
        parts = stage["static"] + stage["kept"] + stage["transient"] + stage["buffers"]
        assert stage["peak_allocated"] == pytest.approx(parts, abs=2)
        inside = [line["bytes"] for line in stage["lines"] if line["line"] != "outside"]
        assert sum(inside) == pytest.approx(stage["peak_allocated"], abs=len(inside))
        assert sum(line["bytes"] for line in stage["lines"]) == pytest.approx(stage["needed"], abs=30)
        assert {line["origin"] for line in stage["lines"]} == {"exact", "modelled"}


def test_the_parameters_of_all_stages_are_those_of_the_model(capsys):
    said = answer(capsys, "llama-3-8b", "--pp", "4", "--dtype", "fp32")
    assert sum(stage["parameters"] for stage in said["stages"]) == 4 * 8_030_261_248


def test_early_stages_hold_more_micro_batches(capsys):
    said = answer(capsys, "llama-3-8b", "--pp", "4", "--micro-batches", "8")
    assert [stage["in_flight"] for stage in said["stages"]] == [[4], [3], [2], [1]]
    kept = [stage["kept"] for stage in said["stages"]]
    assert kept[0] / 4 == pytest.approx(kept[1] / 3, rel=1e-12)


def test_fewer_micro_batches_than_stages_are_fewer_in_flight(capsys):
    said = answer(capsys, "llama-3-8b", "--pp", "8", "--micro-batches", "2")
    assert max(stage["in_flight"][0] for stage in said["stages"]) == 2


def test_without_a_number_enough_micro_batches_are_assumed_and_told(capsys):
    assert main(["estimate", "llama-3-8b", "--pp", "4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["stages"][0]["in_flight"] == [4]
    assert "4 micro-batches are assumed" in err


@pytest.mark.parametrize(("limit", "fits", "code"), [("100GiB", True, 0), ("10GiB", False, 1)])
def test_the_exit_code_is_the_answer(capsys, limit, fits, code):
    said = answer(capsys, "llama-3-8b", "--pp", "4", "--tp", "2", "--memory", limit, code=code)
    assert said["fits"] is fits
    assert said["limit"] == int(limit.removesuffix("GiB")) * GIB
    needed = max(stage["needed"] for stage in said["stages"])
    assert (needed <= said["limit"]) is fits
    assert main(["estimate", "llama-3-8b", "--pp", "4", "--tp", "2", "--memory", limit]) == code
    assert ("fits in" if fits else "does not fit in") in capsys.readouterr().out


def test_outside_memory_counts_for_fitting(capsys):
    stage = answer(capsys, "llama-3-8b", "--tp", "8")["stages"][0]
    between = (stage["peak_allocated"] + stage["needed"]) // 2
    assert answer(capsys, "llama-3-8b", "--tp", "8", "--memory", f"{between}B", code=1)["fits"] is False
    assert answer(capsys, "llama-3-8b", "--tp", "8", "--memory", f"{stage['needed']}B")["fits"] is True


def test_a_named_device_is_the_limit(capsys):
    said = answer(capsys, "llama-3-8b", "--hardware", "a100-40", code=1)
    assert 39 * GIB < said["limit"] < 40 * GIB


def test_lines_sum_to_the_peak_where_gradients_are_still_to_come(capsys):
    (stage,) = answer(capsys, "llama-3-8b", "--seq", "8192")["stages"]
    inside = sum(line["bytes"] for line in stage["lines"] if line["line"] != "outside")
    assert inside == pytest.approx(stage["peak_allocated"], abs=100)
    assert stage["gradients"] < stage["parameters"] / 2


def test_full_recompute_keeps_less_than_select_keeps_less_than_none(capsys):
    kept = [
        answer(capsys, "llama-3-8b", "--pp", "4", "--micro-batches", "8", "--recompute", choice)["stages"][0]["kept"]
        for choice in ("none", "select", "full")
    ]
    assert kept[0] > kept[1] > kept[2]


def test_an_offset_moves_layers(capsys):
    said = answer(capsys, "llama-3-8b", "--pp", "4", "--offset", "[-1,0,1,0]", "--micro-batches", "4")
    assert [stage["layers"] for stage in said["stages"]] == [7, 8, 9, 8]
    said = answer(capsys, "llama-3-8b", "--pp", "2", "--interleave", "2", "--offset", "[[0,1],[0,-1]]")
    assert said["stages"][0]["layer_ids"] == [*range(8), *range(17, 25)]


def test_a_settings_file_gives_the_plan_and_flags_are_laid_over_it(capsys, tmp_path):
    settings = tmp_path / "plan.yaml"
    settings.write_text(
        "evenload: 1\nmodel: llama-3-8b\nsetup: {pp: 2, tp: 2, micro_batches: 4, seq: 2048}\n"
        "layout: [[15, 17]]\npolicy: {full: '0-15'}\n"
    )
    said = answer(capsys, "llama-3-8b", "--config", str(settings))
    assert [stage["layers"] for stage in said["stages"]] == [15, 17]
    assert any("recompute full" in line["name"] for line in said["stages"][1]["lines"])
    longer = answer(capsys, str(settings), "--seq", "4096")
    assert longer["stages"][1]["kept"] > 1.9 * said["stages"][1]["kept"]
    assert [stage["layers"] for stage in longer["stages"]] == [15, 17]


def test_the_screen_says_what_binds(capsys):
    assert main(["estimate", "llama-3-8b", "--pp", "4", "--tp", "2", "--memory", "40GiB"]) == 0
    out = capsys.readouterr().out
    assert "stage 0 needs most, in the backward of chunk 0; its largest parts:" in out
    assert "kept by 8 dense layers x 4 micro-batches (modelled)" in out
    assert "GiB = 2**30 bytes" in out
    assert " GB" not in out


SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


def test_what_was_left_out_of_a_model_is_told(capsys, tmp_path):
    stored = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(
        json.dumps(SMALL | {"quantization_config": stored, "tie_word_embeding": True})
    )
    said = answer(capsys, str(tmp_path))
    facts = " ".join(warning["fact"] for warning in said["warnings"])
    assert "quantization_config says how the published weights are stored" in facts
    assert "the unknown key 'tie_word_embeding' is ignored" in facts
    for verb in ("estimate", "simulate", "names"):
        assert main([verb, str(tmp_path)]) == 0
        assert "warning: " in capsys.readouterr().err


def test_a_stage_without_layers_is_told(capsys, tmp_path):
    flags = ["--pp", "2", "--micro-batches", "2"]
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert main(["estimate", str(tmp_path), *flags, "--offset", "[-1,1]"]) == 0
    assert "warning: --offset: stage 0 of chunk 0 holds no layer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "heading"),
    [
        ("llama-3-8b", "llama-3-8b: 8.03 billion parameters in 32 layers, "),
        ("deepseek-v3", "deepseek-v3: 682.64 billion parameters in 61 layers and 1 MTP layer, "),
    ],
)
def test_the_heading_counts_what_the_model_has(capsys, model, heading):
    assert main(["estimate", model]) == 0
    assert capsys.readouterr().out.startswith(heading)


def test_verbose_adds_assumptions_ignored_keys_and_operators(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"made_up_key": 1}))
    assert main(["estimate", str(tmp_path), "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "keys of the model not used: made_up_key" in out
    assert "bf16 parameters, bf16 gradients" in out
    assert r"feed_forward\.mul" in out
    said = answer(capsys, str(tmp_path), "--verbose")
    assert said["ignored_keys"] == ["made_up_key"]
    assert said["operators"]["dense"]["kept"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-model"], "neither a preset nor a file"),
        (["llama-3-8b", "--pp", "0"], "--pp: pp is 0"),
        (["llama-3-8b", "--pp", "many"], "--pp"),
        (["llama-3-8b", "--pp", "64"], "--pp"),
        (["llama-3-8b", "--tp", "3"], "--tp: tp 3 does not divide"),
        (["llama-3-8b", "--ep", "2"], "--ep"),
        (["llama-3-8b", "--seq", "-1"], "--seq: seq is -1"),
        (["llama-3-8b", "--seq", "99999999999"], "--seq"),
        (["llama-3-8b", "--dtype", "int8"], "--dtype: dtype is 'int8'"),
        (["llama-3-8b", "--dtype", "fp8", "--hardware", "a100"], "--dtype: a100-80 has no fp8 matrix rate"),
        (["llama-3-8b", "--zero", "4"], "--zero: zero is 4"),
        (["llama-3-8b", "--memory", "0"], "--memory: '0' is not a positive size"),
        (
            ["llama-3-8b", "--memory", "64"],
            "--memory: '64' is 64 bytes, less than any device has\n  fix: give the unit, such as 64GiB",
        ),
        (["llama-3-8b", "--memory", "1kB"], "'1kB' is 1000 bytes"),
        (["llama-3-8b", "--memory", "64 parsecs"], "unknown unit 'parsecs'"),
        (["llama-3-8b", "--recompute", "ful"], "did you mean 'full'?"),
        (["llama-3-8b", "--schedule", "1f2b"], "--schedule: there is no schedule '1f2b'"),
        (["llama-3-8b", "--schedule", "gpipe", "--pp", "2", "--interleave", "2"], "one chunk per stage"),
        (["llama-3-8b", "--backend", "jax"], "--backend: backend is 'jax'"),
        (["llama-3-8b", "--hardware", "h1000"], "did you mean 'h100'"),
        (["llama-3-8b", "--hardware", "missing.json"], "missing.json"),
        (["llama-3-8b", "--config", "missing.yaml"], "missing.yaml"),
        (["llama-3-8b", "--offset", "[1,"], "--offset"),
        (["llama-3-8b", "--pp", "4", "--offset", "[1,1]"], "--offset"),
        (["llama-3-8b", "--pp", "4", "--offset", "[1,0,0,0]"], "offset"),
        (["llama-3-8b", "--offset", '{"a": 1}'], "--offset"),
    ],
)
def test_mistakes_are_messages(capsys, words, said):
    assert said in refusal(capsys, *words)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff\xfe", '{"model_type": "llama"}', "null"])
def test_a_broken_model_file_is_a_message(capsys, tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="latin-1")
    assert "config.json" in refusal(capsys, str(path))


def test_names_lists_operators_with_both_patterns(capsys):
    assert main(["names", "llama-3-8b", "--seq", "1024", "--json"]) == 0
    dense = json.loads(capsys.readouterr().out)["dense"]
    found = {one["operator"]: one for one in dense["operators"]}
    product = found["mlp.mul"]
    assert product["bytes"] == 1024 * 14336 * 2
    assert product["huggingface"]["pattern"] == r"mlp\.mul"
    assert product["mindformers"]["pattern"] == r"feed_forward\.mul"
    assert product["mindformers"]["freed"] == product["bytes"]
    assert found["mlp.act_fn.silu"]["mindformers"]["pattern"] == r"feed_forward\.w1\.activation\.silu"
    assert sum(one["bytes"] for one in dense["operators"]) <= dense["kept"]


def test_names_calls_a_collective_by_what_it_sends(capsys):
    assert main(["names", "llama-3-8b", "--tp", "2", "--sequence-parallel", "--json"]) == 0
    dense = json.loads(capsys.readouterr().out)["dense"]
    gather = next(one for one in dense["operators"] if one["operator"] == "mlp.all_gather_into_tensor")
    assert gather["mindformers"]["pattern"] == r"ffn_norm\.norm"
    assert gather["mindformers"]["freed"] == gather["bytes"] == 4096 * 4096 * 2


def test_names_as_a_table(capsys):
    assert main(["names", "llama-3-8b"]) == 0
    out = capsys.readouterr().out
    assert "embedding: keeps nothing" in out
    assert "dense: keeps" in out
    assert main(["names", "no-such-model"]) == 2


def test_an_estimate_needs_neither_torch_nor_the_solver():
    code = (
        "import sys; from evenload.cli.main import main; "
        "rc = main(['estimate', 'llama-3.1-405b', '--pp', '16', '--tp', '8', '--micro-batches', '64']); "
        "sys.exit(rc or any(name in sys.modules for name in ('torch', 'transformers', 'plotly', 'highspy')))"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment())


def test_autocast_keeps_copies_of_weights_and_narrow_products(capsys):
    flags = ("llama-3-8b", "--dtype", "fp32", "--seq", "8192", "--micro-batches", "2")
    wide, low = (answer(capsys, *flags, *more)["stages"][0] for more in ((), ("--autocast", "bf16")))
    assert wide["static"] == low["static"]
    assert low["kept"] < wide["kept"]
    (half,) = answer(capsys, "llama-3-8b", "--seq", "8192", "--autocast", "bf16")["stages"]
    assert half["kept"] == answer(capsys, "llama-3-8b", "--seq", "8192")["stages"][0]["kept"]
    assert "no type of autocast" in refusal(capsys, "llama-3-8b", "--autocast", "int8")
    assert "not counted for capped scores" in refusal(capsys, "gemma-2-9b", "--dtype", "fp32", "--autocast", "bf16")


PROGRAM = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x

def build():
    return Net(), torch.empty(16, 64)

def alone():
    return Net()

def step(model):
    model(torch.rand(16, 64)).sum().backward()

def flat():
    return nn.Linear(64, 64), torch.empty(16, 64)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "traced_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "traced_program", raising=False)
    return "traced_program"


def test_a_function_is_estimated_planned_and_named(capsys, program):
    said = answer(capsys, f"{program}:build", "--pp", "2", "--micro-batches", "4", "--memory", "1GiB")
    assert [stage["layers"] for stage in said["stages"]] == [4, 4]
    assert said["fits"] is True
    plan = ["plan", f"{program}:build", "--pp", "2", "--micro-batches", "4", "--memory", "1GiB", "--out", "p.yaml"]
    assert main([*plan, "--no-explain"]) == 0
    capsys.readouterr()
    assert answer(capsys, "p.yaml")["model"] == f"{program}:build"
    assert main(["names", f"{program}:build"]) == 0
    named = capsys.readouterr().out
    assert "Sequential: keeps" in named
    assert "0.linear" in named
    shapes = answer(capsys, f"{program}:alone", "--input", "16x64")
    stepped = answer(capsys, f"{program}:alone", "--step", f"{program}:step")
    assert shapes["stages"][0]["parameters"] == stepped["stages"][0]["parameters"] == 9 * (64 * 64 + 64) * 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{program}:alone"], "nothing says what the model is called with"),
        (["{program}:flat"], "no repeated layers"),
        (["{program}:build", "--layers", "layer"], "did you mean 'layers'"),
        (["{program}:build", "--tp", "2"], "decides that itself"),
        (["{program}:build", "--pp", "9"], "at most 8"),
        (["{program}:nothing"], "has no 'nothing'"),
        (["llama-3-8b", "--step", "a:b"], "--step is for functions"),
    ],
)
def test_what_cannot_be_traced_is_said_in_one_sentence(capsys, program, words, says):
    assert says in refusal(capsys, *(word.format(program=program) for word in words))
