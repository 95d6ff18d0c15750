"""`evenload track` runs a script as Python does, and its ledger survives whatever happens to the script."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evenload.cli.main import main
from evenload.cli.track import ledger_path
from evenload.ledger.curve import by_category, live, peaks
from evenload.ledger.files import read_ledger
from evenload.ledger.words import Category, MarkKind

SOURCE = str(Path(__file__).parents[2] / "src")

TRAIN = """
import sys, torch
model = torch.nn.Linear(10, 10)
adam = torch.optim.Adam(model.parameters())
for _ in range(2):
    model(torch.randn(4, 10)).sum().backward()
    adam.step()
    adam.zero_grad()
"""


KEEPS = """
import torch
class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.clone()
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * 2
Keeps.apply(torch.ones(1000, requires_grad=True)).sum().backward()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A writer of scripts in an empty working directory; the interpreter is put right afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def write(text, name="train.py"):
        Path(name).write_text(text)
        return name

    return write


def test_a_script_is_run_as_main_with_its_own_words(script, capsys):
    script(TRAIN + "print(__name__, sys.argv, __file__)\n")
    assert main(["track", "train.py", "--out", "3", "-m", "--", "x"]) == 0
    out, err = capsys.readouterr()
    assert out == f"__main__ ['train.py', '--out', '3', '-m', '--', 'x'] {Path('train.py').absolute()}\n"
    assert err.startswith("wrote train.ledger: 28 allocations, peak 2.51 KiB on cpu (2.12 KiB needed)\n")
    ledger = read_ledger("train.ledger")
    assert ledger.metadata.command == ("train.py", "--out", "3", "-m", "--", "x")
    assert ledger.complete
    sums = by_category(ledger, live(ledger, ledger.end))
    assert sums[Category.PARAMETER] == 440  # what the script leaves behind is still there
    assert sums[Category.OPTIMIZER] == 2 * 440 + 2 * 4


def test_the_answer_in_json_has_the_same_numbers(script, capsys):
    script(TRAIN)
    assert main(["track", "--json", "--stacks", "-o", "deep/x.ledger", "train.py"]) == 0
    answer = json.loads(capsys.readouterr().out)
    ledger = read_ledger("deep/x.ledger")
    assert answer["allocations"] == len(ledger.allocations) == 28
    assert answer["peaks"]["held"] == peaks(ledger).held
    assert answer["device"] == "cpu"
    assert ledger.source(0).startswith(str(Path("train.py").absolute()))


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit()", 0),
        ("sys.exit('no')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", 130),
        ("from evenload import EvenloadError; raise EvenloadError('mine', exit_code=2)", 1),
    ],
)
def test_the_exit_code_is_the_scripts_own(script, end, code):
    script(TRAIN + end)
    assert main(["track", "train.py"]) == code
    assert len(read_ledger("train.ledger").allocations) == 28


def test_a_failure_is_shown_as_python_shows_it_and_noted(script, capsys):
    script("import torch\nx = torch.ones(5)\ndef f():\n    raise ValueError('own')\nf()\n")
    assert main(["track", "train.py"]) == 1
    err = capsys.readouterr().err
    shown = err[: err.index("wrote")]
    plain = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False)
    assert shown == plain.stderr
    ledger = read_ledger("train.ledger")
    assert [mark.text for mark in ledger.marks if mark.kind is MarkKind.NOTE] == ["ended by ValueError: own"]
    assert live(ledger, ledger.end).tolist() == [0]


def test_a_syntax_error_is_the_scripts_own(script, capsys):
    script("x = (\n")
    assert main(["track", "train.py"]) == 1
    assert "SyntaxError: '(' was never closed" in capsys.readouterr().err


def test_modules_are_found_beside_the_script_and_packages_run_with_m(script, capsys):
    script("VALUE = 3\n", "beside.py")
    script("import beside; print(beside.VALUE)\n")
    assert main(["track", "train.py"]) == 0
    Path("pack").mkdir()
    script("", "pack/__init__.py")
    script("import sys\nfrom . import inner\nprint(inner.NAME, sys.argv[1:], __package__)\n", "pack/__main__.py")
    script("NAME = 'inner'\n", "pack/inner.py")
    assert main(["track", "-m", "pack", "--flag"]) == 0
    assert capsys.readouterr().out == "3\ninner ['--flag'] pack\n"
    assert read_ledger("pack.ledger").metadata.command == ("pack", "--flag")


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["nowhere.py"], "nowhere.py: there is no such script"),
        (["."], "this is a directory, not a script"),
        (["-m", "no_such_module"], "there is no module 'no_such_module' that can be run"),
        (["-m", "evenload.errors.x"], "there is no module 'evenload.errors.x' that can be run"),
    ],
)
def test_what_cannot_be_run_is_named_before_anything_is_written(script, capsys, words, fact):
    assert main(["track", *words]) == 2
    assert fact in capsys.readouterr().err
    assert list(Path.cwd().iterdir()) == []


def test_an_existing_ledger_is_kept_unless_forced(script, capsys):
    script("print('ran')\n")
    Path("train.ledger").write_text("precious")
    assert main(["track", "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "exists and would be overwritten" in err
    assert Path("train.ledger").read_text() == "precious"
    assert main(["track", "--force", "train.py"]) == 0
    assert read_ledger("train.ledger").complete


def test_every_rank_has_a_file_of_its_own(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert ledger_path("deep/train.py", given=False) == Path("train.ledger")
    assert ledger_path("out/x.bin", given=True) == Path("out/x.bin")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ledger_path("deep/train.py", given=False) == Path("train.rank3.ledger")
    assert ledger_path("out/x.bin", given=True) == Path("out/x.rank3.bin")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ledger_path("train.py", given=False) == Path("train.ledger")


def track(*words, **options):
    environment = {**os.environ, "PYTHONPATH": SOURCE, **options}
    command = [sys.executable, "-m", "evenload", "track", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_script_that_is_killed_leaves_everything_up_to_its_last_operator(script):
    script("import os, signal, torch\nkept = [torch.ones(100 + i) + 1 for i in range(1000)]\nos.kill(os.getpid(), 9)\n")
    assert track("train.py").returncode == -signal.SIGKILL
    ledger = read_ledger("train.ledger")
    assert not ledger.complete
    assert "did not end by itself" in ledger.notices[0].fact
    rows = ledger.allocations
    assert len(rows) == 2000
    assert live(ledger, ledger.end).tolist() == [*range(1, 1998, 2), 1998, 1999]  # up to the last operator
    assert peaks(ledger).held == sum(4 * (100 + i) for i in range(1000)) + 4 * 1099
    assert (rows.last_used > 0).all()


def test_an_allocation_that_cannot_be_satisfied_leaves_a_readable_ledger(script, capsys):
    script("import torch\nx = torch.ones(1000)\ny = torch.ones(2**58)\n")
    assert main(["track", "train.py"]) == 1
    ledger = read_ledger("train.ledger")
    (failed,) = [mark for mark in ledger.marks if mark.kind is MarkKind.FAILED]
    assert failed.value == 2**60
    assert ledger.complete


def test_custom_functions_are_audited_where_that_is_asked_for(script, capsys):
    script(KEEPS)
    assert main(["track", "--audit", "train.py"]) == 0
    assert "3.91 KiB a call are kept and never read: do not save ctx.kept" in capsys.readouterr().out
    assert main(["track", "--audit", "--force", "--json", "train.py"]) == 0
    [function] = json.loads(capsys.readouterr().out)["functions"]
    assert (function["name"], function["calls"]) == ("Keeps", 1)
    assert [(kept["name"], kept["how"], kept["read"]) for kept in function["kept"]] == [
        ("ctx.kept", "attribute", False)
    ]


def test_forked_workers_leave_no_trace_and_shared_batches_are_the_hosts(script):
    script(
        """
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        torch.arange(1000).flip(0).sort()  # operators that the recording has not seen yet
        return torch.full((1000,), float(i))

model = torch.nn.Linear(1000, 1)
total = 0.0
for batch in DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
    total += model(batch).sum().item()
print("ok", total != 0)
"""
    )
    ran = track("train.py")
    assert ran.returncode == 0, ran.stderr
    assert "ok" in ran.stdout
    ledger = read_ledger("train.ledger")
    assert ledger.complete
    foreign = ledger.allocations.device == ledger.devices.index("foreign")
    assert ledger.allocations.nbytes[foreign].tolist() == [16000, 16000]
    assert 4000 not in ledger.allocations.nbytes[~foreign][1:].tolist()
