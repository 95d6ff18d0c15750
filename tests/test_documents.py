"""Every command that the documents show is run, in the order in which they show it, and prints what they show."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from evenload.cli.main import main

ROOT = Path(__file__).parent.parent
EXAMPLES = "examples/README.md"


def commands(document: str) -> list[str]:
    """Commands in the code blocks of a document."""
    return re.findall(r"^(?:    )?\$? ?(evenload .+)$", (ROOT / document).read_text("utf-8"), flags=re.MULTILINE)


def run_all(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(command, exit code) of every command, run where the examples lie and nothing else."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return [(command, main(shlex.split(command)[1:])) for command in commands(document)]


@pytest.mark.slow
def test_every_command_of_the_examples_says_yes(tmp_path, monkeypatch, capsys):
    codes = run_all(EXAMPLES, tmp_path, monkeypatch)
    assert codes
    assert [command for command, code in codes if code != 0] == []
    assert "Traceback" not in capsys.readouterr().err


def sessions(document: str) -> list[tuple[str, str]]:
    """(command, what the document shows of its output) of every command after a `$` in a document."""
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", (ROOT / document).read_text("utf-8"), flags=re.MULTILINE)
    found: list[tuple[str, str]] = []
    for block in blocks:
        first, *shown = re.split(r"^    \$ (.+)\n", block, flags=re.MULTILINE)
        assert not shown or not first.strip(), f"output before a command: {first}"
        texts = [re.sub(r"^    ", "", text, flags=re.MULTILINE).strip("\n") for text in shown[1::2]]
        found += zip(shown[::2], texts, strict=True)
    return found


def as_shown(printed: str, shown: str) -> bool:
    """Whether an output is what a document shows; there, `...` is any number of lines, or a part of one.

    Seconds that something took are never the same, and not compared.
    """
    printed, shown = (re.sub(r"\b[\d.]+ s\b", "T s", text) for text in (printed, shown))
    if not shown:
        return True
    parts = [
        "(?:.*\n)*?" if line == "..." else ".*?".join(map(re.escape, line.split("..."))) + "\n"
        for line in shown.splitlines()
    ]
    return re.fullmatch("".join(parts), printed.strip("\n") + "\n") is not None


VERBS = {
    "README.md": {"estimate", "dryrun", "track", "report"},
    "docs/why-is-my-memory.md": {"report", "estimate", "track", "dryrun", "diff"},
    "docs/dryrun.md": {"dryrun", "estimate", "plan", "names"},
}


@pytest.mark.slow
@pytest.mark.parametrize("document", VERBS)
def test_a_walk_through_commands_prints_what_it_shows(document, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "evenload"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m evenload "$@"\n')
    command.chmod(0o755)
    paths = os.pathsep.join((str(ROOT / "src"), str(tmp_path)))
    env = os.environ | {"PYTHONPATH": paths, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    shown = sessions(document)
    assert {line.split()[1] for line, _ in shown} == VERBS[document]
    for line, text in shown:
        ran = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=env, check=False, text=True, stdout=-1, stderr=subprocess.STDOUT
        )
        assert ran.returncode == 2 if text.startswith("error: ") else ran.returncode in (0, 1), ran.stdout
        assert "Traceback (most recent call last)" not in ran.stdout
        assert as_shown(ran.stdout, text), f"$ {line}\n{ran.stdout}\n--- is not\n{text}"


def test_every_example_is_used():
    documents = [ROOT / "README.md", ROOT / EXAMPLES, *(ROOT / "docs").glob("*.md")]
    text = " ".join(document.read_text("utf-8") for document in documents)
    for example in (ROOT / "examples").glob("*/*"):
        if example.name != "__pycache__":
            assert f"examples/{example.parent.name}/{example.name}" in text
