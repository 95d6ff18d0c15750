"""`evenload diff` through the door."""

import dataclasses
import json

import msgspec
import pytest
from tests.ledger.ledgers import step
from tests.ledger.test_diff import ESTIMATE, doubled

from evenload.cli.main import main
from evenload.ledger.files import write_ledger
from evenload.ledger.words import Category


@pytest.fixture
def run(capsys, tmp_path):
    write_ledger(tmp_path / "a.ledger", step())
    write_ledger(tmp_path / "b.ledger", doubled(Category.ACTIVATION))
    (tmp_path / "estimate.json").write_text(json.dumps(ESTIMATE))
    (tmp_path / "list.json").write_text("{")
    names = {path.name: str(path) for path in tmp_path.iterdir()}

    def run(*words):
        code = main(["diff", *(names.get(str(word), str(word)) for word in words)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_two_ledgers_are_compared_and_json_has_the_same_numbers(run):
    code, out, _ = run("a.ledger", "b.ledger")
    assert code == 0
    assert "activation of layers.0" in out
    assert json.loads(run("a.ledger", "b.ledger", "--json")[1])["peaks"]["held"]["change"] == 40


def test_a_limit_answers_with_the_exit_code(run):
    assert run("a.ledger", "b.ledger", "--within", 20)[0] == 0
    assert run("a.ledger", "b.ledger", "--within", 15)[0] == 1
    assert run("a.ledger", "a.ledger", "--within", 0)[0] == 0


def test_a_prediction_is_compared_with_the_stage_of_the_rank(run, tmp_path):
    """Rank 3 of 8 with two stages is on the first."""
    answer = json.loads(run("estimate.json", "a.ledger", "--json")[1])
    assert answer["before"].endswith("estimate.json, stage 0")
    assert answer["peaks"]["held"]["change"] == -10
    assert json.loads(run("estimate.json", "a.ledger", "--stage", 1, "--json")[1])["peaks"]["held"]["before"] == 5
    odd = dataclasses.replace(step(), metadata=msgspec.structs.replace(step().metadata, world=7))
    write_ledger(tmp_path / "odd.ledger", odd)
    code, _, err = run("estimate.json", tmp_path / "odd.ledger")
    assert code == 2
    assert "2 stages and the recording 7 ranks" in err


def test_an_estimate_as_it_is_printed_is_read(run, tmp_path, capsys):
    assert main(["estimate", "llama-3-8b", "--json"]) == 0
    path = tmp_path / "llama.json"
    path.write_text(capsys.readouterr().out)
    code, out, _ = run(path, "a.ledger", "--json")
    assert code == 0
    assert json.loads(out)["peaks"]["held"]["before"] > 10**9


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("a.ledger", "nothing.ledger"), "there is no such file"),
        (("a.ledger", "list.json"), "not valid JSON"),
        (("estimate.json", "a.ledger", "--stage", "5"), "no stage 5"),
        (("a.ledger", "b.ledger", "--within", "-1"), "--within"),
        (("a.ledger", "b.ledger", "--within", "nan"), "--within"),
        (("a.ledger",), "Missing argument"),
    ],
)
def test_mistakes_end_in_one_message_and_exit_code_2(run, words, says):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
