"""`evenload plan` through the door: numbers, files, exit codes, messages."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.planner.problems import BY_ID

from evenload.cli import plan as verb
from evenload.cli.main import main
from evenload.dialects.detect import read_settings
from evenload.profile.given import read_layer_table
from evenload.simulate.timeline import simulate

SMALL = ["--pp", "4", "--micro-batches", "8", "--memory", "700"]
MODEL = ["llama-3-8b", "--pp", "4", "--micro-batches", "8", "--memory", "60GiB", "--effort", "quick"]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(BY_ID["small12_s4"]["layers"]))
    return str(path)


@pytest.fixture
def run(capsys):
    def run(*words):
        code = main(["plan", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_table_is_planned_to_its_proved_optimum(run, table):
    code, out, err = run("--profile", table, *SMALL, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["step_time"] == answer["bound"] == 1238
    assert answer["gap"] == 0
    assert answer["proved"] is True
    assert answer["peak"] == [642, 660, 540, 640]
    assert answer["layers_per_stage"] == [[3, 3, 3, 3]]
    assert answer["recompute"]["full"] == [[2, 0, 0, 0]]
    assert answer["recompute"]["none"] == [[1, 3, 3, 3]]
    assert set(answer["recompute"]) == {"full", "both", "select", "comm", "none"}
    assert set(answer["baselines"]) == {"even_none", "even_full", "even_least"}
    assert answer["baselines"]["even_full"] == {"step_time": 1548, "peak": 532, "fits": True}
    assert answer["baselines"]["even_none"]["fits"] is False
    assert answer["seconds"] > 0
    assert answer["seed"] == 0


def test_the_screen_has_the_same_numbers_and_says_why(run, table):
    code, out, _ = run("--profile", table, *SMALL)
    assert code == 0
    for words in ("step time 1,238 units; no plan is quicker (proved)", "even layers, the least recompute that fits",
                  "is nearest to the limit", "of the critical path", "more memory on every rank", "one layer moved",
                  "2 chunks a stage"):  # fmt: skip
        assert words in out


def test_changes_in_the_answer_can_be_simulated_again(run, table):
    _, out, _ = run("--profile", table, *SMALL, "--json")
    explanation = json.loads(out)["explanation"]
    assert explanation["memory"]["rank"] == 1
    assert [line["name"] for line in explanation["memory"]["largest"]][:2] == ["kept", "parameters"]
    for change in (*explanation["changes"], *explanation["interleave"]):
        offset = [[count - 12 // (4 * change["interleave"]) for count in row] for row in change["layers_per_stage"]]
        words = ["simulate", "--profile", table, "--pp", "4", "--micro-batches", "8", "--schedule", change["schedule"]]
        words += ["--interleave", str(change["interleave"]), "--offset", json.dumps(offset)]
        words += ["--recompute", json.dumps(change["recompute"]["full"]), "--json"]
        assert main(words) == 0


def test_the_plan_that_is_written_is_the_plan_that_is_printed(run, table, tmp_path):
    out_file = tmp_path / "plan.yaml"
    code, out, err = run("--profile", table, *SMALL, "--out", out_file, "--json", "--no-explain")
    assert code == 0
    assert f"wrote {out_file}" in err
    answer, plan = json.loads(out), read_settings(out_file).plan
    timeline = simulate(read_layer_table(BY_ID["small12_s4"]).profile, plan)
    assert timeline.step_time == answer["step_time"]
    assert list(timeline.peak) == answer["peak"]


def test_a_file_that_exists_is_replaced_with_force_only(run, table, tmp_path):
    out_file = tmp_path / "plan.yaml"
    out_file.write_text("mine")
    code, _, err = run("--profile", table, *SMALL, "--out", out_file, "--no-explain")
    assert code == 2
    assert "--force" in err
    assert out_file.read_text() == "mine"
    assert run("--profile", table, *SMALL, "--out", out_file, "--no-explain", "--force")[0] == 0
    assert "evenload" in out_file.read_text()


def test_limits_are_read_in_the_unit_of_the_table(run, table):
    plain = json.loads(run("--profile", table, *SMALL, "--json", "--no-explain")[1])
    named = json.loads(run("--profile", table, *SMALL[:-1], "700MB", "--json", "--no-explain")[1])
    assert plain["limit"] == named["limit"] == 700
    assert plain["step_time"] == named["step_time"]


def test_less_memory_takes_the_short_warm_up(run, table):
    _, out, _ = run("--profile", table, *SMALL, "--interleave", "2", "--less-memory", "--json", "--no-explain")
    assert json.loads(out)["schedule"] == "interleaved_1f1b_less_memory"


def test_a_model_is_planned_and_written_for_mindformers(run, tmp_path):
    out_file = tmp_path / "settings.yaml"
    code, out, _ = run(*MODEL, "--out", out_file, "--to", "mindformers", "--no-explain", "--json")
    answer, reading = json.loads(out), read_settings(out_file, num_layers=32)
    assert code == 0
    assert answer["memory_unit"] == "bytes"
    assert all(peak <= 60 * 2**30 for peak in answer["peak"])
    assert [list(row) for row in reading.plan.layout.table] == answer["layers_per_stage"]


def test_a_mindformers_file_is_edited_in_place_of_its_layout(run, tmp_path):
    settings = Path(__file__).parents[2] / "examples" / "mindformers" / "pretrain_llama2_70b.yaml"
    out_file = tmp_path / "new.yaml"
    words = [settings, "--memory", "64GiB", "--effort", "quick", "--no-explain", "--to", "mindformers"]
    assert run(*words, "--out", out_file)[0] == 0
    named = out_file.with_name("named.yaml")
    assert run(*words, "--out", named, "--into", settings)[0] == 0
    assert named.read_text() == out_file.read_text()
    before, after = settings.read_text().splitlines(), out_file.read_text().splitlines()
    comments = [line for line in before if line.lstrip().startswith("#")]
    assert all(line in after for line in comments)
    assert read_settings(out_file).plan.layout.num_layers == read_settings(settings).plan.layout.num_layers


def test_nothing_fits_is_exit_code_1_with_the_term_and_the_limit_that_would_do(run, table):
    code, out, err = run("--profile", table, "--pp", "4", "--micro-batches", "8", "--memory", "150", "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["fits"] is False
    assert answer["needed"] > 150
    assert "no plan fits in 150 MB" in err
    words = ["--profile", table, "--micro-batches", "8", "--no-explain", "--memory"]
    assert run(*words, answer["needed"], "--pp", "4")[0] == 0
    for remedy in answer["remedies"]:
        assert run(*words, remedy["needed"], *remedy["name"].split())[0] == 0


def test_a_model_that_does_not_fit_is_told_which_degrees_would(run):
    words = ["llama-3-70b", "--pp", "4", "--micro-batches", "8", "--effort", "quick", "--no-explain"]
    code, out, err = run(*words, "--memory", "48GiB")
    assert code == 1
    assert "no plan fits in 48.00 GiB" in err
    assert "--tp 4 (fits)" in out


def test_ctrl_c_prints_the_best_plan_and_says_so(run, table, monkeypatch):
    def stop(progress):
        raise KeyboardInterrupt  # as Ctrl-C does, while the planner is at work

    monkeypatch.setattr("evenload.cli.plan._bar", lambda: nullcontext(stop))
    code, out, err = run("--profile", table, "--pp", "4", "--micro-batches", "8", "--memory", "700MB")
    assert code == 0
    assert "interrupted: this is the best plan found by then" in out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is nothing to plan"),
        (["llama-3-8b"], "there is no memory limit"),
        (["llama-3-8b", "--memory", "0"], "is not a positive size"),
        (["llama-3-8b", "--memory", "64GiB", "--recompute", "full"], "--recompute is what the planner decides"),
        (["llama-3-8b", "--memory", "64GiB", "--offset", "1"], "--offset is what the planner decides"),
        (["llama-3-8b", "--memory", "64GiB", "--to", "mindformers"], "there is no file to write"),
        (["llama-3-8b", "--memory", "64GiB", "--out", "x", "--into", "y"], "--into says nothing"),
        (["llama-3-8b", "--memory", "64GiB", "--effort", "much"], "there is no effort 'much'"),
        (["llama-3-8b", "--memory", "64GiB", "--pp", "64"], "needs 64 chunks"),
        (["llama-3-8b", "--memory", "64GiB", "--schedule", "gpipe", "--less-memory"], "exclude each other"),
        (["--profile", "TABLE", "--pp", "4"], "there is no memory limit"),
        (["--profile", "TABLE", "--memory", "700", "--tp", "2"], "--tp says nothing over a table"),
        (["--profile", "TABLE", "--memory", "700", "--pp", "16"], "needs at least 14 layers"),
        (["llama-3-8b", "--profile", "TABLE", "--memory", "700"], "leaves nothing for a model to say"),
        (["--profile", "missing.json", "--memory", "700"], "there is no such file"),
        (["--profile", "TABLE", "--memory", "700", "--pp", "-1"], "pp is -1"),
    ],
)
def test_bad_input_is_exit_code_2_with_one_message(run, table, words, said):
    code, out, err = run(*[table if word == "TABLE" else word for word in words])
    assert code == 2
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_progress_goes_to_a_terminal_only(capsys):
    with verb._bar() as tell:
        assert tell is None


def test_a_plan_names_its_model_from_where_it_is_written(run, tmp_path, monkeypatch, capsys):
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 4}
    config = {"model_type": "llama", **sizes, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "model.json").write_text(json.dumps(config))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    words = (
        "--pp",
        2,
        "--micro-batches",
        2,
        "--seq",
        32,
        "--memory",
        "1GiB",
        "--effort",
        "quick",
        "--out",
        "deep/plan.yaml",
    )
    assert run("model.json", *words)[0] == 0
    assert "model: ../model.json" in Path("deep/plan.yaml").read_text().replace("'", "")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["estimate", "../deep/plan.yaml"]) == 0
    assert "no such file" not in capsys.readouterr().err
