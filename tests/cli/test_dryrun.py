"""`evenload dryrun`: the JSON of the interface, every kind of target, the exit codes, what is refused."""

import json
import sys
from dataclasses import fields

import pytest
import torch

from evenload.cli.flags import Flags
from evenload.cli.functions import DRY_RUN, TRACE
from evenload.cli.main import main
from evenload.ledger.curve import curve
from evenload.ledger.files import read_ledger

torch.set_num_threads(1)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
PROGRAM = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10))

def with_inputs():
    return build(), torch.empty(2, 3, 32, 32)

def with_step():
    return build(), step

def step(model, optimizer):
    nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.zeros(4, dtype=torch.int64)).backward()
    optimizer.step()
    optimizer.zero_grad()

def language():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=176, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
        vocab_size=1000, use_cache=False, dtype=torch.float32,
    ))

class Deciding(nn.Linear):
    def forward(self, x):
        return x[x > 0].sum() + super().forward(x).sum()

def deciding():
    return Deciding(8, 8), torch.empty(2, 8)

number = 3

def broken():
    raise KeyError("no such key")
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "training_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "training_program", raising=False)
    return "training_program"


def answer(capsys, *words, code=0):
    assert main(["dryrun", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *words):
    assert main(["dryrun", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def test_the_numbers_of_the_interface_belong_together(capsys, config):
    said = answer(capsys, config, "--seq", "128")
    assert said["peak"] == max(said["curve"]) == sum(said["categories"].values())
    assert said["needed"] <= said["peak"]
    assert 0 < said["seconds"] < 60
    assert said["device"] == "cuda:0"
    parameters = 2 * (2 * 1000 * 64 + 3 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 176 + 2 * 64) + 64)
    assert said["categories"]["optimizer state"] == 2 * parameters
    assert said["curve"][0] >= parameters


def test_a_screen_shows_the_peak_and_what_is_not_seen(capsys, config):
    assert main(["dryrun", config, "--seq", "128"]) == 0
    out = capsys.readouterr().out
    assert "peak" in out
    assert "model.layers.*.mlp.gate_proj" in out
    assert "cuBLAS workspace" in out
    assert "operators chosen" not in out
    assert main(["dryrun", config, "--seq", "128", "--verbose"]) == 0
    verbose = capsys.readouterr().out
    for word in ("scaled_dot_product_attention", "foreach", "flex_attention", "masks", "grouped_mm"):
        assert word in verbose.partition("operators chosen")[2]


def test_a_preset_and_flags_say_what_is_run(capsys):
    small = answer(capsys, "qwen3-0.6b", "--seq", "4096")
    large = answer(capsys, "qwen3-0.6b", "--seq", "8192")
    assert small["categories"]["parameter"] == large["categories"]["parameter"]
    assert small["categories"]["activation"] < large["categories"]["activation"]
    assert answer(capsys, "qwen3-0.6b", "--dtype", "fp32")["curve"][0] == pytest.approx(2 * small["curve"][0], rel=1e-6)


def test_recompute_micro_batches_and_the_form_of_adamw_change_the_run(capsys, config):
    flags = (config, "--seq", "512", "--micro-batch", "4")
    plain, full = answer(capsys, *flags), answer(capsys, *flags, "--recompute", "full")
    assert full["peak"] < plain["peak"]
    accumulated = answer(capsys, *flags, "--micro-batches", "2")
    assert plain["peak"] < accumulated["peak"] < plain["peak"] + 2 * plain["categories"]["parameter"]
    short = (config, "--seq", "16")
    fused, loop, foreach = (answer(capsys, *short, "--adamw", form)["peak"] for form in ("fused", "loop", "foreach"))
    assert fused < loop < foreach


def test_a_plan_file_is_run_as_it_says(capsys, config, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"model: {config}\nsetup: {{seq: 512, micro_batch: 4}}\nlayout: [[3]]\npolicy: {{full: '0-2'}}\n")
    said = answer(capsys, str(plan))
    flags = answer(capsys, config, "--seq", "512", "--micro-batch", "4", "--recompute", "full")
    assert said["peak"] == flags["peak"]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("setup: {seq: 64, interleave: 3, schedule: interleaved_1f1b}\nlayout: [[1], [1], [1]]", "interleave"),
        ("setup: {seq: 64, zero: 1}\nlayout: [[3]]", "zero"),
    ],
)
def test_a_plan_for_several_devices_is_refused_rather_than_run_as_one(capsys, config, tmp_path, said, name):
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"model: {config}\n{said}\npolicy: {{full: none}}\n")
    assert main(["dryrun", str(plan), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"$.{name}: {name} is" in captured.err
    assert "one device" in captured.err


def test_a_function_of_the_user_is_run_with_shapes_a_step_or_its_own_inputs(capsys, program):
    shapes = answer(capsys, f"{program}:build", "--input", "2x3x32x32")
    own = answer(capsys, f"{program}:with_inputs")
    assert own["peak"] == shapes["peak"] + own["categories"]["input"]  # held by the caller, not made by every step
    stepped = answer(capsys, f"{program}:build", "--step", f"{program}:step", "--device", "cpu")
    assert stepped["device"] == "cpu"
    assert stepped["categories"]["optimizer state"] > 2 * 4 * 8 * 30 * 30 * 10


def test_kernels_whose_scratch_is_not_seen_are_named_in_a_warning(capsys, program):
    said = answer(capsys, f"{program}:with_inputs", "--device", "cpu")
    assert "aten.convolution, aten.convolution_backward ask for memory" in said["warnings"][0]["fact"]
    assert [row["name"] for row in said["not_seen"]] == ["scratch of a convolution"]


def test_a_language_model_of_a_function_is_the_one_of_its_configuration(capsys, program, config):
    built = answer(capsys, f"{program}:language", "--seq", "128")
    read = answer(capsys, config, "--seq", "128", "--dtype", "fp32")
    assert built["peak"] == read["peak"]
    assert built["curve"][1:] == read["curve"][1:]


def test_few_layers_run_for_real_and_say_what_all_would(capsys, config, program, tmp_path):
    path = tmp_path / "deep.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 8}))
    few = answer(capsys, str(path), "--seq", "32", "--real", "--layers", "4")
    full = answer(capsys, str(path), "--seq", "32", "--real")
    assert few["device"] == full["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert (few["peak"], few["categories"]) == (full["peak"], full["categories"])
    refused = refusal(capsys, str(path), "--layers", "4")
    assert "add --real" in refused
    assert "run at least 4" in refusal(capsys, str(path), "--real", "--layers", "3")
    said = answer(capsys, f"{program}:deciding", "--real")
    assert said["peak"] > 4 * 8 * 9
    assert "--real" in refusal(capsys, f"{program}:deciding")


def test_the_ledger_is_written_on_demand(capsys, config, tmp_path):
    path = tmp_path / "run.ledger"
    said = answer(capsys, config, "--seq", "64", "--out", str(path))
    ledger = read_ledger(path)
    assert curve(ledger).peak == said["peak"]
    assert ledger.metadata.origin == "dry run"
    assert "exists" in refusal(capsys, config, "--out", str(path))


def test_the_exit_code_is_the_answer(capsys, config):
    assert answer(capsys, config, "--seq", "64", "--memory", "80GiB")["fits"] is True
    assert answer(capsys, config, "--seq", "64", "--memory", "1MiB", code=1)["fits"] is False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing:build"], "no module 'nothing'"),
        (["{program}:biuld"], "did you mean 'build'"),
        (["{program}:number"], "not a function"),
        (["{program}:build"], "nothing says what the model is called with"),
        (["{program}:build", "--input", "2,3"], "is no shape"),
        (["{program}:build", "--input", "2x3:text"], "is no type"),
        (["{program}:build", "--input", "2x5"], "raised RuntimeError"),
        (["{program}:build", "--input", "2x3x32x32", "--seq", "8"], "--seq says nothing beside --input"),
        (["{program}:build", "--input", "2x3x32x32", "--micro-batch", "8"], "--micro-batch says nothing beside"),
        (["{program}:with_inputs", "--micro-batch", "8"], "nothing says how long they are"),
        (["{program}:build", "--step", "{program}:step", "--micro-batches", "2"], "--micro-batches says nothing"),
        (["{program}:build", "--step", "{program}:step", "--autocast", "bf16"], "--autocast says nothing beside"),
        (["{program}:build", "--step", "{program}:step", "--input", "2x3x32x32"], "--input says nothing beside"),
        (
            ["{program}:with_inputs", "--input", "4x3x32x32"],
            "returns inputs of its own beside the model, and inputs= (--i",
        ),
        (["{program}:with_inputs", "--seq", "128"], "returns inputs of its own"),
        (
            ["{program}:with_step", "--step", "{program}:step"],
            "returns step of its own beside the model, and step= (--s",
        ),
        (["{program}:with_inputs", "--adamw", "loop", "--optimizer", "sgd"], "the optimizer is sgd"),
        (["{program}:language", "--full", "--layers", "model.layers"], "leave one out"),
        (["{program}:with_inputs", "--memory", "5"], "less than any device has"),
        (["{program}:broken"], "raised KeyError"),
        (["{program}:deciding"], "aten.nonzero"),
        (["{config}", "--step", "a:b"], "--step is for functions"),
        (["{config}", "--backend", "megatron"], "executes PyTorch's own modules"),
        (["{config}", "--master-weights"], "no main copies"),
        (["{config}", "--recompute", "select"], "recomputes single operators"),
        (["{config}", "--steps", "0"], "0 is not possible"),
        (["{config}", "--adamw", "fsued"], "did you mean 'fused'"),
        (["{config}", "--autocast", "int9"], "no type of tensors"),
        (["{config}", "--device", "tpu"], "device is 'tpu'"),
        (["{config}", "--optimizer-dtype", "fp32"], "optimizer_dtype"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_sentence(capsys, program, config, words, says):
    assert says in refusal(capsys, *(word.format(program=program, config=config) for word in words))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "lama"}, "lama"),
        ({"hidden_size": 63}, ""),
        ({"num_hidden_layers": 0}, ""),
        ({"vocab_size": -5}, ""),
    ],
)
def test_a_wrong_configuration_is_refused(capsys, tmp_path, change, says):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **change}))
    assert says in refusal(capsys, str(path))


VALUES = (
    *((name, "2") for name in ("tp", "pp", "interleave", "dp", "cp", "ep", "etp", "zero")),
    *((name, "2") for name in ("micro_batch", "micro_batches")),
    *((name, "fp32") for name in ("dtype", "grad_dtype", "optimizer_dtype")),
    *(("master_weights",), ("sequence_parallel",), ("seq", "32"), ("optimizer", "sgd"), ("attention", "eager")),
    *(("backend", "megatron"), ("schedule", "gpipe"), ("hardware", "h100"), ("recompute", "full"), ("offset", "1")),
    *(("memory", "80GiB"), ("config", "plan.yaml")),
)
"""A value for every flag that verbs share."""


def test_every_flag_has_an_effect_on_the_dry_run_of_a_function_or_is_refused(capsys, program):
    assert {name for name, *_ in VALUES} == {field.name for field in fields(Flags)}
    language = f"{program}:language"
    plain = answer(capsys, language, "--seq", "64")
    for name, *value in VALUES:
        flag = f"--{name.replace('_', '-')}"
        words = (language, *(() if name == "seq" else ("--seq", "64")), flag, *value)
        if name in DRY_RUN:
            said = answer(capsys, *words)
            assert (said["curve"], said.get("limit")) != (plain["curve"], plain.get("limit")), flag
        else:
            said = refusal(capsys, *words)
            assert f"{flag} is for configurations" in said
            assert "fix: " in said


@pytest.mark.parametrize("verb", ["estimate", "plan", "names", "dryrun"])
def test_verbs_refuse_the_same_flags_for_a_function(capsys, program, verb):
    meant = DRY_RUN if verb == "dryrun" else TRACE
    for name, *value in VALUES:
        if name in meant:
            continue
        flag = f"--{name.replace('_', '-')}"
        assert main([verb, f"{program}:language", "--seq", "64", flag, *value]) == 2
        assert f"{flag} is for configurations" in capsys.readouterr().err
