"""`evenload simulate` through the door: numbers, exit codes, messages."""

import json
from dataclasses import replace

import pytest
from tests.simulate.profiles import GIVEN, given_plan

from evenload.cli.main import main
from evenload.cli.tables import limit_in
from evenload.dialects.native import write_native
from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.setup import Setup

SMALL = next(one for one in GIVEN if one["id"] == "small12_s4")
FLAGS = ["--pp", "4", "--micro-batches", "8", "--offset", "[0,0,0,0]", "--recompute", "[2,0,0,0]"]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(SMALL["table"]))
    return str(path)


@pytest.fixture
def run(capsys):
    def run(*words):
        code = main(["simulate", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_table_and_flags_are_simulated(run, table):
    code, out, err = run("--profile", table, *FLAGS, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["step_time"] == 1238
    assert answer["peak"] == [642, 660, 540, 640]
    assert len(answer["actions"]) == 64


def test_the_screen_shows_the_same_numbers(run, table):
    code, out, _ = run("--profile", table, *FLAGS)
    assert code == 0
    assert "step    1,238 units" in out
    assert "660 MB" in out


def test_a_limit_answers_with_the_exit_code(run, table):
    assert run("--profile", table, *FLAGS, "--memory", "660MB")[0] == 0
    code, out, _ = run("--profile", table, *FLAGS, "--memory", "659", "--json")
    assert code == 1
    assert json.loads(out)["fits"] is False


def test_a_plan_file_over_a_table_gives_the_numbers_of_its_flags(run, table, tmp_path):
    recorded = next(one for one in SMALL["plans"] if one["plan"] == "best_known")
    _, plan = given_plan(SMALL, recorded)
    path = tmp_path / "plan.yaml"
    path.write_text(write_native(plan).text)
    code, out, _ = run(path, "--profile", table, "--json")
    assert (code, json.loads(out)["step_time"]) == (0, 1238)
    code, out, _ = run(path, "--profile", table, "--micro-batches", "4", "--schedule", "gpipe", "--json")
    assert json.loads(out)["schedule"] == "gpipe"
    code, _, err = run(path, "--profile", table, "--pp", "2")
    assert code == 2
    assert "--pp is said by the plan file" in err


def test_layers_that_do_not_divide_are_dealt_as_evenly_as_they_can(run, table):
    code, out, _ = run("--profile", table, "--pp", 5, "--micro-batches", 8, "--json")
    assert code == 0
    ends = (150, 0, 0, 0, 220)
    static = [rank["lines"]["parameters"] for rank in json.loads(out)["ranks"]]
    layers = [(held - end) / 100 for held, end in zip(static, ends, strict=True)]
    assert sum(layers) == 12
    assert max(layers) - min(layers) == 1
    assert run("--profile", table, "--pp", 5, "--micro-batches", 8, "--offset", 0)[0] == 2


def test_recompute_can_be_said_in_words(run, table):
    full = json.loads(run("--profile", table, "--pp", 2, "--micro-batches", 4, "--recompute", "full", "--json")[1])
    none = json.loads(run("--profile", table, "--pp", 2, "--micro-batches", 4, "--recompute", "none", "--json")[1])
    assert full["bubble"]["recompute"] > none["bubble"]["recompute"] == 0
    assert max(full["peak"]) < max(none["peak"])


def test_less_memory_is_a_schedule(run, table):
    size = ["--profile", table, "--pp", 2, "--interleave", 2, "--micro-batches", 4]
    assert json.loads(run(*size, "--less-memory", "--json")[1])["schedule"] == "interleaved_1f1b_less_memory"
    assert json.loads(run(*size, "--json")[1])["schedule"] == "interleaved_1f1b"
    assert run(*size, "--less-memory", "--schedule", "1f1b")[0] == 2
    one = ["--profile", table, "--pp", 2, "--micro-batches", 4, "--less-memory", "--json"]
    assert json.loads(run(*one)[1])["schedule"] == "1f1b"


def test_a_model_and_flags_are_simulated_and_agree_with_the_estimate(run, capsys):
    flags = ["llama-3-8b", "--pp", "4", "--tp", "2", "--micro-batches", "8"]
    code, out, err = run(*flags, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert main(["estimate", *flags, "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert answer["peak"] == pytest.approx([stage["peak_allocated"] for stage in stages], abs=2)
    assert (answer["time_unit"], answer["memory_unit"]) == ("seconds", "bytes")
    assert answer["bubble"]["communication"] > 0
    assert answer["step_time"] == pytest.approx(max(action["end"] for action in answer["actions"]))


def test_counts_of_recompute_change_a_model_where_they_say(run):
    flags = ["llama-3-8b", "--pp", "4", "--micro-batches", "8", "--json"]
    none = json.loads(run(*flags)[1])
    first = json.loads(run(*flags, "--recompute", "[8,0,0,0]")[1])
    assert first["peak"][0] < none["peak"][0]
    assert first["peak"][1:] == none["peak"][1:]
    _, out, err = run(*flags, "--recompute", "[8]")
    assert json.loads(out)["peak"] == first["peak"]
    assert "--recompute: 1 counts for 4 stages" in err
    select = json.loads(run(*flags, "--select", "all")[1])
    assert max(select["peak"]) < max(none["peak"])
    assert select["bubble"]["recompute"] > 0


def test_a_plan_file_that_names_its_model_is_enough(run, tmp_path):
    setup = Setup(pp=4, micro_batches=8)
    plan = Plan(setup=setup, layout=Layout.even(32, pp=4), policy=Policy(full=frozenset({0})), model="llama-3-8b")
    path = tmp_path / "plan.yaml"
    path.write_text(write_native(plan).text)
    code, out, _ = run(path, "--json")
    assert code == 0
    nameless = tmp_path / "nameless.yaml"
    nameless.write_text(write_native(replace(plan, model=None)).text)
    assert json.loads(run(nameless, "--model", "llama-3-8b", "--json")[1]) == json.loads(out)
    assert run(nameless)[0] == 2
    assert run(path, "--memory", "1GiB")[0] == 1


def test_times_by_stage_are_simulated(run, tmp_path):
    path = tmp_path / "stages.json"
    path.write_text('{"bt": [[1, 1], [2.5, 1]], "lr": [[0, 1], [2.5, 0]], "m": 4, "method": "vpp"}')
    code, out, _ = run("--profile", path, "--json")
    assert (code, json.loads(out)["step_time"]) == (0, 53)
    code, _, err = run("--profile", path, "--pp", "2")
    assert code == 2
    assert "--pp says nothing over a table of times by stage" in err
    path.write_text('{"bt": [1, 1]}')
    assert "give --micro-batches" in run("--profile", path)[2]
    assert "error: --micro-batches: micro_batches is 0" in run("--profile", path, "--micro-batches", 0)[2]
    assert "error: --schedule: there is no" in run("--profile", path, "--micro-batches", 2, "--schedule", "x")[2]
    assert run("--profile", path, "--micro-batches", 2)[0] == 0
    assert run("--profile", path, "--micro-batches", 2, "--select", "all")[0] == 2
    assert run("plan.yaml", "--profile", path, "--micro-batches", 2)[0] == 2


def test_a_trace_is_written_and_not_overwritten(run, table, tmp_path):
    trace = tmp_path / "out" / "trace.json"
    code, _, err = run("--profile", table, *FLAGS, "--trace", trace)
    assert code == 0
    assert "wrote" in err
    assert json.loads(trace.read_text())["traceEvents"]
    before = trace.read_text()
    code, _, err = run("--profile", table, "--pp", 2, "--trace", trace)
    assert code == 2
    assert "--force" in err
    assert trace.read_text() == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "there is nothing to simulate"),
        (("--profile", "TABLE", "--pp", "0"), "--pp: pp is 0"),
        (("--profile", "TABLE", "--tp", "2"), "--tp says nothing over a table"),
        (("llama-3-9b",), "llama-3-9b"),
        (("llama-3-8b", "--pp", "4", "--select", "[1,0,0,0,0]"), "--select"),
        (("llama-3-8b", "--pp", "4", "--schedule", "gpipe", "--interleave", "2"), "one chunk per stage"),
        (("--profile", "TABLE", "--pp", "-4"), "--pp: pp is -4"),
        (("--profile", "TABLE", "--pp", "100"), "--pp: pp 100 x interleave 1 needs 100 chunks"),
        (("--profile", "TABLE", "--pp", "4", "--offset", "[1,2"), "--offset"),
        (("--profile", "TABLE", "--pp", "4", "--offset", "[1,0,0]"), "--offset: 3 entries for 4 stages"),
        (("--profile", "TABLE", "--pp", "4", "--offset", "nan"), "--offset"),
        (("--profile", "TABLE", "--pp", "4", "--recompute", "maybe"), "--recompute"),
        (("--profile", "TABLE", "--pp", "4", "--select", "all"), "no memory for layers"),
        (("--profile", "TABLE", "--pp", "4", "--schedule", "1f2b"), "did you mean '1f1b'?"),
        (("--profile", "TABLE", "--pp", "4", "--schedule", "ZBVZeroBubble"), "not there yet"),
        (("--profile", "TABLE", "--pp", "4", "--memory", "0"), "--memory"),
        (("--profile", "TABLE", "--pp", "4", "--memory", "64 parsecs"), "--memory"),
        (("--profile", "TABLE", "--pp", "4", "--micro-batches", "16777216"), "--micro-batches"),
        (("--profile", "TABLE", "--pp", "12", "--micro-batches", "60000"), "actions"),
        (("--profile", "no/such.json"), "there is no such file"),
        (("no/such.yaml", "--profile", "TABLE"), "there is no such file"),
        (("no/such.yaml",), "no such file"),
        (("no/such.yaml", "--model", "llama-3-8b"), "no such file"),
    ],
)
def test_mistakes_end_in_one_message_and_exit_code_2(run, table, words, says):
    code, out, err = run(*(table if word == "TABLE" else word for word in words))
    assert code == 2
    assert out == ""
    assert says in err
    assert err.startswith("error: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "unit", "limit"),
    [
        ("53000MB", "MB", 53000),
        ("53000", "MB", 53000),
        ("56 GB", "MB", 56000),
        ("1GiB", "MB", 1073.741824),
        ("1GiB", "bytes", 2**30),
        ("1000", "bytes", 1000),
        ("7.5", "units", 7.5),
    ],
)
def test_a_limit_is_turned_into_the_unit_of_the_table(text, unit, limit):
    assert limit_in(text, unit) == pytest.approx(limit)


def test_a_limit_with_a_unit_needs_a_table_with_one():
    with pytest.raises(EvenloadError, match="cannot be turned into"):
        limit_in("64GiB", "units")
