"""The door: exit codes, streams, and no traceback."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenload import __version__
from evenload.cli import main as door
from evenload.cli.main import main
from evenload.errors import ANSWER_NO, EvenloadError

from .process import environment


@pytest.fixture
def verb(monkeypatch):
    """Adds one verb named `try` that runs a given function."""

    def add(function):
        monkeypatch.setitem(sys.modules, "a_verb_for_the_test", SimpleNamespace(run=function))
        monkeypatch.setattr(door, "VERBS", {"try": "a_verb_for_the_test:run"})

    return add


def test_the_version_is_the_answer(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"evenload {__version__}\n"


def test_an_unknown_verb_is_a_wrong_input(capsys):
    assert main(["nonsense"]) == 2
    assert "No such command" in capsys.readouterr().err


def test_the_modules_behind_all_verbs_load(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in door.VERBS)


def test_an_error_is_a_message_on_stderr_and_its_exit_code(capsys, verb):
    def fail(code: int):
        raise EvenloadError("it is wrong", where="a.yaml:1:2", fix="mend it", exit_code=code)

    verb(fail)
    assert main(["try", "2"]) == 2
    assert capsys.readouterr() == ("", "error: a.yaml:1:2: it is wrong\n  fix: mend it\n")
    assert main(["try", str(ANSWER_NO)]) == ANSWER_NO


def test_wrong_usage_exits_2(capsys, verb):
    verb(lambda: None)
    assert main(["try", "--nonsense"]) == 2
    assert main(["try", "extra"]) == 2
    assert main(["try"]) == 0


def test_control_c_exits_130_without_a_traceback(capsys, verb):
    def slow():
        raise KeyboardInterrupt

    verb(slow)
    assert main(["try"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_goes_away_leaves_no_traceback():
    program = [sys.executable, "-m", "evenload", "--help"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == door.BROKEN_PIPE


def test_a_verb_that_closes_stdout_leaves_no_traceback(verb, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())

    def closing():
        sys.stdout.close()

    verb(closing)
    assert main(["try"]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["--help"], ["estimate", "llama-3-8b", "--json", "--pp", "8"], ["--version"]])
def test_a_full_disk_behind_stdout_is_one_message(words):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "evenload", *words],
            stdout=full,
            check=False,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
    assert done.returncode == 2
    assert "error: standard output: cannot write: no space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_closed_streams_leave_the_exit_code():
    program = f"{sys.executable} -m evenload --version >&- 2>&-"
    assert subprocess.run(program, shell=True, check=False, env=environment()).returncode == 0


def test_no_verb_needs_torch():
    code = (
        "import sys; from evenload.cli.main import main; main(['--help']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'plotly')))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment()).returncode
        == 0
    )


def test_starting_imports_only_what_answering_needs():
    code = (
        "import sys; from evenload.cli.main import main; main(['--version']); "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'networkx', 'highspy', 'rich.progress')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment()).returncode == 0


@pytest.mark.parametrize(
    ("words", "code"), [(["train", "none.yaml"], 2), (["profile", "none", "--out", "x"], 2), (["--version"], 0)]
)
def test_one_of_many_processes_ends_with_its_code_and_all_its_words(tmp_path, words, code):
    program = "import atexit, sys; atexit.register(print, 'shut down'); from evenload.cli.main import entry; entry()"
    ran = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        env={**environment(), "WORLD_SIZE": "2", "RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == code
    assert ran.stderr.startswith("error: ") == (code != 0)
    assert ("shut down" in ran.stdout) == (code == 0)
