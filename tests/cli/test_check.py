"""`evenload check`: the log lines of the documentation, the tables, and the JSON that other programs rely on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evenload.cli.main import main

from .process import environment

DATA = Path(__file__).parent.parent / "data" / "dialects"


def check(capsys, file, *options):
    code = main(["check", str(file), *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_documented_example_prints_the_documented_lines_first(capsys):
    code, out, err = check(capsys, DATA / "seed.yaml")
    assert code == 0
    assert err == ""
    assert out.startswith((DATA / "seed.log").read_text())


def test_every_stage_and_every_layer_is_shown(capsys):
    _, out, _ = check(capsys, DATA / "glm4_9b.yaml")
    lines = out.splitlines()
    assert "layers                9       10       12        9   40" in lines
    assert "full recompute        6        3        2        3   14" in lines
    assert "   0-5      0      0  full       all" in lines
    assert " 34-39      3      0  none" in lines
    assert "device memory: 58.00 GiB" in lines
    assert lines[-1].startswith("warning: ")
    assert "glm4_9b.yaml:49:31: MindFormers slices activations only" in lines[-1]


def test_verbose_has_a_row_for_every_layer(capsys):
    _, out, _ = check(capsys, DATA / "glm4_9b.yaml", "--verbose")
    table = out.split("What each layer does\n")[1].split("\n\n")[0].splitlines()
    assert len(table) == 1 + 40
    assert "setup: pp 4, tp 1, cp 1, dp 2" in out


def test_json_has_the_fields_that_programs_rely_on(capsys):
    code, out, err = check(capsys, DATA / "seed.yaml", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["layers_per_stage"] == [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]
    assert answer["accumulated"] == [[4, 9, 14, 19, 24], [29, 34, 39, 44, 48]]
    first, second = answer["pipeline_ids"][:24], answer["pipeline_ids"][24:]
    assert first == [0] * 4 + [1] * 5 + [2] * 5 + [3] * 5 + [4] * 5
    assert second == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5 + [4] * 4
    assert answer["interleave_ids"] == [0] * 24 + [1] * 24
    assert answer["full"] == [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert answer["select"] == {
        r"feed_forward\.w1\.activation\.silu": [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]],
        r"feed_forward\.mul": [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]],
        r"feed_forward\.w1\.matmul": [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]],
        r"feed_forward\.w3\.matmul": [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
    }
    assert answer["select_comm"] == {
        r"ffn_norm\.norm": [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]],
        r"attention_norm\.norm": [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]],
    }
    assert answer["per_layer"][0] == {"layer": 0, "stage": 0, "chunk": 0, "full": True, "select": [], "comm": []}
    assert answer["per_layer"][29] == {
        "layer": 29,
        "stage": 1,
        "chunk": 1,
        "full": False,
        "select": [r"feed_forward\.w1\.activation\.silu", r"feed_forward\.mul", r"feed_forward\.w1\.matmul"],
        "comm": [r"ffn_norm\.norm", r"attention_norm\.norm"],
    }
    assert all(set(warning) == {"fact", "where", "fix"} for warning in answer["warnings"])


def test_module_paths_are_shown_as_they_are_written(capsys):
    _, out, _ = check(capsys, DATA / "pynative.yaml", "--json")
    answer = json.loads(out)
    assert answer["dialect"] == "mindformers-pynative"
    assert answer["select"] == {
        "layers.*.self_attention.*": [[4, 4], [4, 4]],
        "layers.*.mlp.*": [[4, 4], [2, 0]],
    }
    assert answer["per_layer"][12]["select"] == ["layers.*.self_attention.*"]
    assert answer["per_layer"][3]["select"] == ["layers.*.self_attention.*", "layers.*.mlp.*"]
    _, out, _ = check(capsys, DATA / "pynative.yaml")
    assert not out.startswith("INFO"), "MindFormers r2.0 logs no such lines"
    assert "layers.*.mlp.*" in out


def test_a_plan_and_megatron_arguments_are_checked_as_well(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("evenload: 1\nsetup: {pp: 2}\nlayout: [[2, 1]]\npolicy: {full: 0}\n")
    code, out, _ = check(capsys, plan)
    assert code == 0
    assert out.startswith("Layers of every stage\n")
    assert out.endswith("no warnings\n")
    script = tmp_path / "train.sh"
    script.write_text("torchrun x.py --num-layers 4 --pipeline-model-parallel-size 2\n")
    _, out, _ = check(capsys, script, "--json")
    assert json.loads(out)["layers_per_stage"] == [[2, 2]]


def test_the_model_gives_the_layers_that_a_section_leaves_out(capsys, tmp_path):
    file = tmp_path / "part.yaml"
    file.write_text("recompute_config:\n  recompute: [4, 2, 1, 1]\n")
    code, out, err = check(capsys, file, "--json")
    assert (code, out) == (2, "")
    assert "--model" in err
    code, out, _ = check(capsys, file, "--json", "--model", "llama-3-8b")
    assert code == 0
    assert json.loads(out)["layers_per_stage"] == [[8, 8, 8, 8]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"model: [", "a.yaml:1:"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "binary file"),
        (b"", "the file is empty"),
        ("recompute_config: {recompute: [\xfc]}".encode("latin-1"), "not UTF-8"),
        (b"recompute_config: {recompute: 1}\nrecompute_config: {}\n", "given twice"),
        (b"model_config: {num_layers: 8, offset: [1, 2]}\nparallel_config: {pipeline_stage: 2}\n", "must sum to 0"),
        (b"model_config: {num_layers: 8, offset: {a: 1}}\nparallel_config: {pipeline_stage: 2}\n", "a.yaml:1:39"),
        (b"model_config: {num_layers: .nan}\n", "a.yaml:1:28"),
        (b"model_config: {num_layers: 999999999999999999999}\n", "a.yaml:1:28"),
        (b"model_config: {num_layers: 8}\nparallel_config: {pipeline_stage: 99999}\n", "a.yaml"),
        (b"model_config: {num_layers: 8}\nrecompute_config: {select_recompute: {1: [1]}}\n", ""),
        (b"model_config: 3\nrecompute_config: [1]\n", "a.yaml:2:19: recompute_config is [1]"),
    ],
)
def test_wrong_files_exit_2_with_one_message_and_no_traceback(capsys, tmp_path, content, said):
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    code, out, err = check(capsys, file)
    if said:
        assert code == 2
        assert out == ""
        assert said in err
        assert err.startswith("error: ")
    assert "Traceback" not in err


def test_files_that_are_none(capsys, tmp_path):
    assert check(capsys, tmp_path / "none.yaml")[0] == 2
    assert check(capsys, tmp_path)[0] == 2


def test_the_answer_comes_without_heavy_imports():
    code = (
        "import sys; from evenload.cli.main import main; main(['check', sys.argv[1]]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'networkx', 'highspy', 'plotly')))"
    )
    program = [sys.executable, "-c", code, str(DATA / "seed.yaml")]
    assert subprocess.run(program, capture_output=True, check=False, env=environment()).returncode == 0


def test_the_shipped_example_is_checked_without_a_warning(capsys):
    example = Path(__file__).parents[2] / "examples" / "mindformers" / "pretrain_llama2_70b.yaml"
    code, out, err = check(capsys, example)
    assert (code, err) == (0, "")
    assert out.endswith("\nno warnings\n")
    (line,) = [line for line in out.splitlines() if line.startswith("layers, all chunks")]
    assert line.split()[3:] == ["9", "10", "10", "10", "10", "10", "11", "10", "80"]
