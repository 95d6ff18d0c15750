"""`evenload report` through the door: messages, settings, exit codes."""

import io
import json

import pytest
from tests.ledger import oom_texts as texts

from evenload.cli.main import main
from evenload.ledger.settings import VARIABLES
from evenload.units import GIB


@pytest.fixture
def run(capsys, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(*words, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = main(["report", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_an_out_of_memory_message_is_explained_from_a_pipe(run):
    code, out, err = run("--oom", "-", stdin=texts.FRAGMENTED)
    assert (code, err) == (0, "")
    assert "cuda:3 on rank 3 had no room for 2.00 GiB" in out
    assert 'export PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"' in out


def test_json_has_the_same_numbers(run, tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(texts.FRAGMENTED)
    code, out, _ = run("--oom", log, "--json")
    [message] = json.loads(out)["oom"]
    assert (code, message["unallocated"], message["reason"]) == (0, round(17.5 * GIB), "fragmentation")


ON = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@pytest.mark.parametrize("way", ["flag", "text only", "file", "log", "environment"])
def test_a_setting_that_is_on_is_not_advised_wherever_it_was_said(run, tmp_path, monkeypatch, way):
    script = tmp_path / "run.sh"
    script.write_text(f"export {ON}\n")
    words = {"flag": ["--alloc-conf", ON], "text only": ["--alloc-conf", ON.partition("=")[2]]}.get(way, [])
    words = ["--alloc-conf", script] if way == "file" else words
    stdin = f"+ export {ON}\n{texts.FRAGMENTED}" if way == "log" else texts.FRAGMENTED
    if way == "environment":
        monkeypatch.setenv(*ON.split("="))
    code, out, _ = run("--oom", "-", "--json", *words, stdin=stdin)
    answer = json.loads(out)
    assert code == 0
    assert answer["settings"] == {"expandable_segments": "True"}
    assert [advice["setting"] for advice in answer["oom"][0]["advice"]] == [None, None]


def test_settings_of_another_allocator_are_not_taken_for_those_of_the_device(run):
    _, out, _ = run("--oom", "-", "--json", "--alloc-conf", "MS_ALLOC_CONF=enable_vmm:True", stdin=texts.FRAGMENTED)
    assert json.loads(out)["settings"] is None
    npu = "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"
    _, out, _ = run("--oom", "-", "--json", "--alloc-conf", npu, stdin=texts.NPU)
    assert json.loads(out)["settings"] == {"expandable_segments": "True"}


def test_settings_alone_are_checked(run, tmp_path):
    code, out, err = run("--alloc-conf", "expandable_segments:True")
    assert (code, err) == (0, "")
    assert "nothing is wrong" in out
    code, out, _ = run("--alloc-conf", "expandable_segments=True")
    assert code == 1
    assert "write expandable_segments:True" in out
    script = tmp_path / "run.sh"
    script.write_text("export MS_ALLOC_CONF=enable_vmm:True\nexport MS_ALLOC_CONF=memory_tracker:True\n")
    code, out, _ = run("--alloc-conf", script, "--json")
    answer = json.loads(out)
    assert code == 1
    assert "wipes enable_vmm of line 1" in answer["warnings"][0]["fact"]
    assert answer["variables"] == [
        {"variable": "MS_ALLOC_CONF", "settings": {"memory_tracker": "True"}, "accepted": True}
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "there is nothing to report on"),
        (("--oom", "-"), "nothing came in"),
        (("--oom", "no/such.log"), "there is no such file"),
    ],
)
def test_mistakes_end_in_one_message_and_exit_code_2(run, words, says):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_a_log_without_a_message_is_wrong_input(run):
    code, _, err = run("--oom", "-", stdin="all is well\n")
    assert code == 2
    assert "holds no out-of-memory message" in err
