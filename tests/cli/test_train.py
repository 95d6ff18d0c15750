"""`evenload train` in this process: one rank needs no launcher."""

from __future__ import annotations

import fcntl
import json
import signal

import numpy as np
import pytest
from tests.runtime.running import SOURCE, Run, losses, write_plan

from evenload.cli._shared import SILENCE
from evenload.cli.main import main

SHORT = ("--implementation", "reference", "--steps", "3")
OWN = (*SHORT, "--data", "text.txt")
OWN_MODEL = """
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x).relu()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 8)
        self.blocks = nn.ModuleList([Layer(), Layer()])
        self.out = nn.Linear(8, 256)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

def build():
    return Model()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "few.txt").write_text("hi")
    np.full(500, 999, dtype="<u2").tofile(tmp_path / "high.bin")
    write_plan(tmp_path, [2], policy="{full: '0'}")
    return tmp_path


def test_a_run_says_how_it_goes(folder, capsys):
    assert main(["train", "plan.yaml", *OWN, "--log-file", "log.jsonl", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["step"] == 3
    assert answer["loss"] == losses(folder / "log.jsonl")[3]
    assert "step 1  loss 5." in err
    assert "tokens/s" in err


def test_settings_come_from_a_file_and_flags_go_over_them(folder, capsys):
    (folder / "run.yaml").write_text("data: [text.txt]\nsteps: 2\nseed: 3\nimplementation: reference\n")
    assert main(["train", "plan.yaml", "--settings", "run.yaml", "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "step 1 " in out
    assert "step 2 " not in out


def test_the_peak_is_predicted_before_the_first_step_and_measured(folder, capsys):
    assert main(["train", "plan.yaml", *OWN, "--memory-file", "memory.json"]) == 0
    (rank,) = json.loads((folder / "memory.json").read_text())["ranks"]
    assert rank["predicted"] == rank["measured"] == sum(rank["held"].values())
    out = capsys.readouterr().out
    assert out.index("difference") > out.index("step 1 ")


def test_predicted_peaks_are_written_over_nothing(folder, capsys):
    (folder / "evenload-memory.json").write_text("mine")
    assert main(["train", "plan.yaml", *OWN]) == 0
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved"]) == 0
    assert (folder / "evenload-memory.json").read_text() == "mine"
    for path in ("evenload-memory-2.json", "saved/evenload-memory.json"):
        (rank,) = json.loads((folder / path).read_text())["ranks"]
        assert rank["predicted"] == rank["measured"]
    out = capsys.readouterr().out
    assert out.startswith("predicted peaks are in evenload-memory-2.json\nstep 1 ")
    assert "predicted peaks are in saved/evenload-memory.json" in out


@pytest.mark.slow
def test_predicted_peaks_are_there_when_the_first_step_kills_the_process(folder):
    kill = "        if type(x) is torch.Tensor:\n            os.kill(os.getpid(), signal.SIGKILL)\n"
    goes_on = "        return x + self"
    killed = "import os, signal, torch\n" + OWN_MODEL.replace(goes_on, kill + goes_on)
    (folder / "mine.py").write_text(killed)
    (folder / "mine.yaml").write_text((folder / "plan.yaml").read_text().replace("model-2.json", "mine:build"))
    run = Run(1, folder, "mine.yaml", "--data", "text.txt", PYTHONPATH=f"{SOURCE}:{folder}").wait()
    assert run.codes == [-signal.SIGKILL], run.outputs
    (rank,) = json.loads((folder / "evenload-memory.json").read_text())["ranks"]
    assert rank["predicted"] > 0
    assert rank["measured"] is None


def test_a_prediction_stands_even_where_the_run_fails(folder):
    assert main(["train", "plan.yaml", *OWN, "--memory-file", "memory.json", "--learning-rate", "1e30"]) == 1
    (rank,) = json.loads((folder / "memory.json").read_text())["ranks"]
    assert rank["predicted"] > 0


def test_nothing_is_predicted_when_nobody_asks(folder, capsys):
    assert main(["train", "plan.yaml", *OWN, "--no-predict"]) == 0
    assert not list(folder.glob("evenload-memory*"))
    assert "difference" not in capsys.readouterr().out


def test_a_plan_may_name_a_function_of_the_users(folder, monkeypatch):
    (folder / "mine.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(folder)
    plan = (folder / "plan.yaml").read_text().replace("model-2.json", "mine:build")
    (folder / "mine.yaml").write_text(plan)
    assert main(["train", "mine.yaml", "--data", "text.txt", "--steps", "3", "--memory-file", "memory.json"]) == 0
    (rank,) = json.loads((folder / "memory.json").read_text())["ranks"]
    assert rank["predicted"] == rank["measured"]


def test_token_files_are_read(folder):
    (np.arange(500) % 256).astype("<u2").tofile(folder / "tokens.bin")
    assert main(["train", "plan.yaml", *SHORT, "--data", "tokens.bin"]) == 0


def test_the_garbage_collector_runs_when_it_is_told(folder):
    assert main(["train", "plan.yaml", *OWN, "--collect-every", "1"]) == 0


@pytest.mark.parametrize("form", ["fused", "foreach", "loop"])
def test_every_form_of_adamw_learns_the_same(folder, form):
    assert main(["train", "plan.yaml", *OWN, "--adamw", form, "--log-file", "log.jsonl"]) == 0
    assert losses(folder / "log.jsonl")[3] == pytest.approx(5.5441, abs=0.05)


@pytest.mark.parametrize("dtype", ["--dtype=bf16", "--autocast=bf16"])
def test_sixteen_bits_learn_about_the_same(folder, dtype):
    assert main(["train", "plan.yaml", *OWN, dtype, "--log-file", "log.jsonl"]) == 0
    assert losses(folder / "log.jsonl")[3] == pytest.approx(5.5441, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--data", "odd.bin"), "odd.bin: the file has 3 bytes"),
        (("--data", "few.txt"), "the data has 2 tokens, and one sequence needs 34"),
        (("--data", "*.none"), "no file is called *.none"),
        (("--data", "high.bin"), "the data has the token 999, and the model's vocabulary has 256"),
        (("--data", "."), "cannot read the file"),
        (("--schedule", "zigzag"), "has no schedule 'zigzag'"),
        (("--backend", "megatron"), "backend is megatron"),
        (("--dtype", "fp8"), "dtype is fp8"),
        (("--optimizer", "sgd"), "optimizer is sgd"),
        (("--master-weights", "--dtype", "bf16"), "no main copies"),
        (("--pp", "2"), "the plan is for 2 processes, and 1 runs"),
        (("--steps", "0"), "steps is 0"),
        (("--learning-rate", "nan"), "learning_rate is nan"),
        (("--autocast", "fp4"), "autocast is 'fp4'"),
        (("--adamw", "fuse"), "did you mean 'fused'"),
        (("--implementation", "jax"), "implementation is 'jax'"),
        (("--resume",), "there is no directory of checkpoints"),
        (("--checkpoints", "few.txt"), "few.txt"),
        (("--settings", "few.txt"), "few.txt"),
        (("--settings", "none.yaml"), "there is no such file"),
    ],
)
def test_mistakes_are_said_clearly(folder, capsys, arguments, says):
    assert main(["train", "plan.yaml", *(SHORT if "--data" in arguments else OWN), *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def test_a_key_that_no_run_has_is_named_with_its_line(folder, capsys):
    (folder / "run.yaml").write_text("steps: 2\nlearning_rat: 0.1\n")
    assert main(["train", "plan.yaml", "--settings", "run.yaml"]) == 2
    assert "run.yaml:2:1: the key 'learning_rat' is not known here" in capsys.readouterr().err


def test_a_loss_that_is_no_number_ends_the_run(folder, capsys):
    assert main(["train", "plan.yaml", *OWN, "--learning-rate", "1e30", "--steps", "9"]) == 1
    assert "the loss is not a number any more" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(folder, capsys):
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved"]) == 0
    (folder / "saved" / "step-00000003" / ".metadata").write_bytes(b"nothing")
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved", "--resume"]) == 2
    assert "the checkpoint cannot be read" in capsys.readouterr().err


def test_a_run_that_is_done_stays_done(folder, capsys):
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved"]) == 0
    capsys.readouterr()
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved", "--resume", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["step"] == 3
    assert answer["loss"] is None


def test_a_new_run_does_not_take_the_checkpoints_of_another(folder, capsys):
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved"]) == 0
    before = {path: path.read_bytes() for path in (folder / "saved").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved", "--seed", "2"]) == 2
    err = capsys.readouterr().err
    assert "saved: the directory has checkpoints of a run, up to step-00000003" in err
    assert "--resume" in err
    assert {path: path.read_bytes() for path in (folder / "saved").rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_a_larger_model_is_refused(folder, capsys):
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved"]) == 0
    write_plan(folder, [1], "one.yaml")
    assert main(["train", "one.yaml", *OWN, "--checkpoints", "saved", "--resume"]) == 2
    err = capsys.readouterr().err
    assert "saved/step-00000003: the checkpoint has 'model.layers.1." in err
    assert "which this model does not have" in err


def test_a_checkpoint_of_a_newer_format_is_refused(folder, capsys):
    newer = folder / "saved" / "step-00000003" / "evenload.json"
    newer.parent.mkdir(parents=True)
    newer.write_text('{"evenload": "9.0", "step": 3, "seed": 0, "format": 2, "more": 1}')
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved", "--resume"]) == 2
    assert "has format 2" in capsys.readouterr().err


def test_two_runs_do_not_save_in_one_directory_at_the_same_time(folder, capsys):
    (folder / "saved").mkdir()
    with (folder / "saved" / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved"]) == 2
        assert "saved: another run that is still going saves there" in capsys.readouterr().err
        assert [path.name for path in (folder / "saved").iterdir()] == [".lock"]
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "saved"]) == 0


def test_a_place_for_checkpoints_is_tried_before_the_first_step(folder, capsys):
    assert main(["train", "plan.yaml", *OWN, "--checkpoints", "few.txt/saved"]) == 2
    out, err = capsys.readouterr()
    assert "few.txt/saved: cannot write the checkpoint" in err
    assert "step 1 " not in out


def test_buffers_that_training_changes_go_on_where_they_were(folder, monkeypatch):
    counts = (
        "        self.register_buffer('seen', torch.zeros(()))\n\n    def forward(self, x):\n        self.seen += 1\n"
    )
    model = OWN_MODEL.replace("\n    def forward(self, x):\n", counts, 1).replace("x + self", "x + self.seen * self")
    (folder / "counting.py").write_text(f"import torch\n{model}")
    monkeypatch.syspath_prepend(folder)
    plan = (folder / "plan.yaml").read_text().replace("model-2.json", "counting:build").replace("full: '0'", "")
    (folder / "counting.yaml").write_text(plan)
    train = ("train", "counting.yaml", "--data", "text.txt", "--log-every", "1")
    assert main([*train, "--steps", "4", "--log-file", "whole.jsonl"]) == 0
    assert main([*train, "--steps", "2", "--checkpoints", "saved"]) == 0
    assert main([*train, "--steps", "4", "--checkpoints", "saved", "--resume", "--log-file", "rest.jsonl"]) == 0
    whole, rest = losses(folder / "whole.jsonl"), losses(folder / "rest.jsonl")
    assert rest == {step: whole[step] for step in (3, 4)}


def test_what_a_users_function_raises_is_said_with_its_line(folder, monkeypatch, capsys):
    (folder / "nowhere.py").write_text("def build():\n    raise RuntimeError('no such weights')\n")
    monkeypatch.syspath_prepend(folder)
    (folder / "mine.yaml").write_text((folder / "plan.yaml").read_text().replace("model-2.json", "nowhere:build"))
    assert main(["train", "mine.yaml", "--data", "text.txt"]) == 2
    err = capsys.readouterr().err
    assert "nowhere.py:2: the function that makes the model raised RuntimeError: no such weights" in err


def test_a_silent_rank_under_torchrun_ends_after_the_one_that_speaks(folder, capsys, monkeypatch):
    slept = []
    monkeypatch.setattr("evenload.cli._shared.time.sleep", slept.append)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for words in (("none.yaml",), ("plan.yaml", *OWN)):  # each rank finds both by itself
        assert main(["train", *words]) == 2
    assert slept == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    for words in (("none.yaml",), ("plan.yaml", *OWN)):
        assert main(["train", *words]) == 2
    assert slept == [SILENCE, SILENCE]
    assert "error:" not in capsys.readouterr().err
