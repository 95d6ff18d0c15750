"""Every command that the documents show is run, in the order in which they show it."""

import re
import shlex
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
@pytest.mark.parametrize("document", ["README.md", EXAMPLES])
def test_every_command_of_a_document_says_yes(document, tmp_path, monkeypatch, capsys):
    codes = run_all(document, tmp_path, monkeypatch)
    assert codes
    assert [command for command, code in codes if code != 0] == []
    assert "Traceback" not in capsys.readouterr().err


def test_every_example_is_used():
    used = " ".join(commands(EXAMPLES))
    for example in (ROOT / "examples").glob("*/*"):
        assert f"examples/{example.parent.name}/{example.name}" in used
