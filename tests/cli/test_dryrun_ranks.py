"""`evenload dryrun` of plans for several devices: one rank of them, with its collectives."""

import json

import pytest
import torch

from evenload.cli.main import main
from evenload.ledger.files import read_ledger

torch.set_num_threads(1)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def answer(capsys, *words, code=0):
    assert main(["dryrun", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_rank_says_what_it_sends_and_receives(capsys, config):
    said = answer(
        capsys, config, "--seq", "64", "--tp", "2", "--sequence-parallel", "--dp", "4", "--zero", "3", "--rank", "5"
    )
    assert (said["rank"], said["world"]) == (5, 8)
    gathers = [one for one in said["collectives"] if one["name"] == "all_gather" and one["phase"] == "forward"]
    assert {one["ranks"] for one in gathers} == {2, 4}
    assert said["categories"]["communication buffer"] > 0
    assert main(["dryrun", config, "--seq", "64", "--dp", "2", "--zero", "3", "--verbose"]) == 0
    screen = capsys.readouterr().out
    assert "rank 0 of 2" in screen
    assert "collectives of a step" in screen
    assert "reduce_scatter" in screen


def test_a_settings_file_with_degrees_is_run_as_one_rank(capsys, config, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"model: {config}\nsetup: {{seq: 64, tp: 2}}\nlayout: [[4]]\npolicy: {{full: none}}\n")
    divided = answer(capsys, str(plan))
    alone = answer(capsys, config, "--seq", "64")
    assert divided["world"] == 2
    assert divided["categories"]["parameter"] < 0.6 * alone["categories"]["parameter"]
    assert "collectives" not in alone


def test_a_limit_is_judged_and_a_ledger_written(capsys, config, tmp_path):
    words = (config, "--seq", "64", "--dp", "2")
    answer(capsys, *words, "--memory", "1MiB", "--out", str(tmp_path / "rank.ledger"), code=1)
    assert read_ledger(tmp_path / "rank.ledger").metadata.world == 2
    assert answer(capsys, *words, "--memory", "1GiB")["fits"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dp", "2", "--rank", "2"], "there is no rank 2 of 2"),
        (["--rank", "1"], "there is no rank 1 of 1"),
        (["--tp", "3"], "tp 3 does not divide"),
        (["--tp", "4"], "tp 4 does not divide the 2 heads of layer 0.self_attn.k_proj"),
        (["--dp", "2", "--zero", "1"], "zero is 1"),
        (["--cp", "2"], "cp is 2"),
    ],
)
def test_what_no_rank_can_run_is_refused(capsys, config, words, told):
    assert main(["dryrun", config, "--seq", "64", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert "Traceback" not in err


def test_without_a_rank_every_stage_has_a_line(capsys, config):
    words = (config, "--seq", "64", "--pp", "2", "--tp", "2", "--sequence-parallel", "--micro-batches", "2")
    said = answer(capsys, *words, "--memory", "1GiB")
    assert [one["rank"] for one in said["ranks"]] == [0, 2]
    assert said["peak"] == max(one["peak"] for one in said["ranks"])
    assert said["fits"] is True
    assert all(one["collectives"] for one in said["ranks"])
    assert main(["dryrun", *words, "--memory", "1MiB"]) == 1
    screen = capsys.readouterr().out
    assert "stage  rank" in screen
    assert "does not fit in" in screen
    assert main(["dryrun", *words, "--out", "stages.ledger"]) == 2
    assert "say which by --rank" in capsys.readouterr().err
