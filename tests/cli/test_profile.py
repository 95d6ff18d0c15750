"""`evenload profile`, and what reads its file: one process needs no launcher."""

from __future__ import annotations

import json

import pytest
import torch
from tests.runtime.running import write_plan

from evenload.cli.main import main

SMALL = ("--seq", "32", "--dtype", "fp32", "--implementation", "reference", "--rounds", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("profile")
    write_plan(folder, [4])
    write_plan(folder, [5], "other.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["profile", "model-4.json", *SMALL, "--out", "measured.json"]) == 0
        plan = ["plan", "--profile", "measured.json", "--micro-batches", "2", "--memory", "1GiB", "--no-explain"]
        assert main([*plan, "--out", "planned.yaml"]) == 0
        yield folder


@pytest.fixture(autouse=True)
def _here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_every_kind_and_choice_has_times(folder):
    data = json.loads((folder / "measured.json").read_text())
    (layer,) = set(data["times"]) - {"before the layers", "after the layers"}
    policies = [(run["policy"]["full"], bool(run["policy"]["select"])) for run in data["times"][layer]["runs"]]
    assert policies == [(False, False), (False, True), (True, False)]
    plain, _, full = data["times"][layer]["runs"]
    assert 0 < plain["forward"]["median"] < 1
    assert full["backward"]["median"] >= plain["backward"]["median"]
    assert data["times"]["after the layers"]["update"]["median"] > 0
    assert data["conditions"]["threads"] == 1


def test_a_plan_names_its_profile_and_training_tells_the_time_of_a_step(folder, capsys):
    text = (folder / "planned.yaml").read_text()
    assert "profile: measured.json" in text
    assert "model: model-4.json" in text
    run = ("--data", "text.txt", "--steps", "6", "--implementation", "reference", "--memory-file", "memory.json")
    assert main(["train", "planned.yaml", *run]) == 0
    assert "step time: predicted" in capsys.readouterr().out
    found = json.loads((folder / "memory.json").read_text())["step_time"]
    assert found["predicted"] > 0
    assert found["measured"] > 0
    assert found["steps"] == 2


def test_a_profile_may_be_named_beside_a_plan_that_names_none(capsys):
    run = ("--data", "text.txt", "--steps", "1", "--implementation", "reference")
    assert main(["train", "plan.yaml", "--profile", "measured.json", *run]) == 0
    assert "too few steps" in capsys.readouterr().out


def test_a_profile_that_only_the_plan_names_may_be_gone(folder, capsys):
    text = (folder / "planned.yaml").read_text().replace("measured.json", "gone.json")
    (folder / "moved.yaml").write_text(text)
    run = ("--data", "text.txt", "--steps", "1", "--implementation", "reference")
    assert main(["train", "moved.yaml", *run]) == 0
    assert "no step time is predicted: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["estimate", "simulate"])
def test_other_verbs_take_it(verb, capsys):
    arguments = ["--profile", "measured.json", "--pp", "2", "--micro-batches", "4", "--offset", "[1,-1]", "--json"]
    assert main([verb, *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    if verb == "estimate":
        assert [stage["layers"] for stage in answer["stages"]] == [3, 1]
    else:
        assert answer["step_time"] > 0


def test_what_is_measured_needs_what_the_rehearsal_says(capsys, folder):
    """One rank: nothing is sent, so the two ways to predict a peak must meet."""
    assert main(["estimate", "--profile", "measured.json", "planned.yaml", "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)["stages"][0]["peak_allocated"]
    predicted = json.loads((folder / "memory.json").read_text())["ranks"][0]["predicted"]
    assert estimated == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("profile", "model-4.json", *SMALL, "--out", "measured.json"), "would be overwritten"),
        (("profile", "model-4.json", "--out", "m.json", "--rounds", "0"), "rounds is 0"),
        (("profile", "model-4.json", "--out", "m.json", "--pp", "2"), "--pp says nothing of a single layer"),
        (("profile", "model-4.json", "--out", "m.json", "--bandwidth", "fast"), "--bandwidth"),
        (("profile", "none.json", "--out", "m.json"), "no such file"),
        (("profile", "plan.yaml", *SMALL, "--layers", "model.norms", "--out", "m.json"), "model.norms"),
        (("plan", "--profile", "measured.json", "--seq", "64", "--memory", "1GiB"), "--seq: seq is 64, but"),
        (("plan", "--profile", "measured.json", "--tp", "2", "--memory", "1GiB"), "--tp: tp is 2"),
        (("plan", "model-5.json", "--profile", "measured.json", "--memory", "1GiB"), "another model"),
        (("plan", "--profile", "measured.json"), "there is no memory limit"),
        (("plan", "--profile", "model-4.json", "--memory", "1GiB"), "this is no layer table"),
        (("simulate", "other.yaml", "--profile", "measured.json"), "another model"),
        (("estimate",), "there is nothing to estimate"),
        (("estimate", "--profile", "text.txt"), "not valid JSON"),
        (("train", "other.yaml", "--profile", "measured.json", "--implementation", "reference"), "another model"),
        (("train", "plan.yaml", "--profile", "text.txt", "--data", "text.txt"), "not valid JSON"),
        (
            ("train", "plan.yaml", "--profile", "measured.json", *SMALL[4:6], "--adamw", "loop"),
            "the form of AdamW is loop",
        ),
    ],
)
def test_mistakes_are_said_clearly(words, says, capsys):
    assert main(list(words)) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
