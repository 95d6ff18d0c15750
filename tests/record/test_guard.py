"""Whatever goes wrong in the recorder, the program runs as it would have without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evenload
from evenload.ledger.files import read_ledger
from evenload.ledger.words import MarkKind
from evenload.record import unreleased
from evenload.record.phases import Phases
from evenload.record.recorder import Recorder
from evenload.record.storages import Storages

SOURCE = str(Path(__file__).parents[2] / "src")


def train(steps=6):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def failing_after(calls, original):
    def fails(*args, **kwargs):
        fails.left -= 1
        if fails.left < 0:
            raise LookupError("no such thing")
        return original(*args, **kwargs)

    fails.left = calls
    return fails


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (Storages, "ran", 100),
        (Storages, "ran", 0),
        (Storages, "resized", 0),
        (Storages, "settle", 30),
        (Phases, "enter_module", 5),
        (Phases, "begin_backward", 1),
        (Phases, "end_backward", 1),
        (Phases, "in_backward", 9),
        (Phases, "begin_optimizer", 1),
    ],
)
def test_a_failure_of_the_recorder_is_a_warning_and_not_the_programs(owner, name, calls, monkeypatch, tmp_path):
    expected = train()
    monkeypatch.setattr(Recorder, "strict", False)
    monkeypatch.setattr(owner, name, failing_after(calls, getattr(owner, name)))
    with evenload.record(stacks=True, path=tmp_path / "a.ledger") as recording:
        assert train() == expected
    if name == "resized":  # nothing was
        assert recording.notices == ()
        return
    [notice] = recording.notices
    assert (
        "the recording broke off, and the program went on: LookupError: no such thing in test_guard.py" in notice.fact
    )
    monkeypatch.undo()
    ledger = read_ledger(tmp_path / "a.ledger")  # up to there
    assert (ledger.allocations.last_used <= ledger.end).all()
    assert train() == expected


def test_what_broke_off_is_noted_in_the_ledger(monkeypatch):
    monkeypatch.setattr(Recorder, "strict", False)
    monkeypatch.setattr(Phases, "enter_module", failing_after(5, Phases.enter_module))
    with evenload.record() as recording:
        train()
    assert any("broke off" in (m.text or "") for m in recording.ledger.marks if m.kind is MarkKind.NOTE)
    assert 0 < len(recording.ledger.allocations) < 60


@pytest.mark.parametrize("when", ["during", "end"])
def test_a_look_at_owners_that_fails_is_left_out_and_the_rest_is_there(when, monkeypatch):
    monkeypatch.setattr(Recorder, "strict", False)
    monkeypatch.setattr(unreleased, "find_owners", failing_after(0 if when == "during" else 1, unreleased.find_owners))
    keep = []
    with evenload.record() as recording:
        for _ in range(8):
            keep.append(torch.ones(5000))
            recording.step()
    [notice] = recording.notices
    assert "a look at who holds what failed, and is left out: LookupError" in notice.fact
    assert recording.ledger.complete
    assert len(recording.ledger.allocations) == 8


def test_in_the_tests_of_the_recorder_its_failures_are_raised(monkeypatch):
    monkeypatch.setattr(Phases, "enter_module", failing_after(0, Phases.enter_module))
    with pytest.raises(LookupError), evenload.record():
        train()


def test_an_error_that_cannot_be_printed_is_the_programs_own():
    class Hostile(Exception):  # noqa: N818
        def __str__(self):
            raise ValueError

    with pytest.raises(Hostile), evenload.record() as recording:
        raise Hostile
    assert any(mark.text == "ended by Hostile" for mark in recording.ledger.marks)


def test_it_stays_quiet_when_the_program_runs_out_of_stack():
    model = torch.nn.Linear(2, 2)

    def deep(n):
        model(torch.ones(1, 2))
        return deep(n + 1)

    with evenload.record(), pytest.raises(RecursionError):
        deep(0)


HOSTILE = """
import gc, torch
class Evil:
    def __init__(self): self.t = torch.ones(5000); self.me = self
    def __getattr__(self, name): raise ValueError(name)
    @property
    def __dict__(self): raise ValueError("no")
    @property
    def __class__(self): raise ValueError("no")
    def __repr__(self): raise ValueError("no")
    def __eq__(self, other): raise ValueError("no")
    __hash__ = None
class Slots:
    __slots__ = ("t",)
    def __init__(self): self.t = torch.ones(5000)
class Table(dict):
    def items(self): raise ValueError("no")
    def get(self, *args): raise ValueError("no")
class Items(list):
    def __iter__(self): raise ValueError("no")
class Sub(torch.Tensor):
    def __bool__(self): raise RuntimeError("no")
    def __len__(self): raise RuntimeError("no")
    def __eq__(self, other): raise RuntimeError("no")
    __hash__ = torch.Tensor.__hash__
gc.disable()
keep, table, items, subs = [], Table(), Items(), []
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    keep.append(Slots()); Evil(); dict.__setitem__(table, step, torch.ones(4000)); items.append(torch.ones(3000))
    subs.append(torch.ones(2000).as_subclass(Sub))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
print("ok")
"""
ODD = {
    "objects that raise when they are looked at": (HOSTILE, 0, "ok\n"),
    "another folder": (
        "import os, tempfile, torch\nos.chdir(tempfile.mkdtemp())\ntorch.ones(9) + 1\nprint(os.listdir('.'))\n",
        0,
        "[]\n",
    ),
    "a folder that is gone": (
        "import os, tempfile, torch\nos.chdir(d := tempfile.mkdtemp())\nos.rmdir(d)\ntorch.ones(9) + 1\nprint('ok')\n",
        0,
        "ok\n",
    ),
    "the end without an end": (
        "import os, torch\ntorch.ones(9) + 1\nprint('ok', flush=True)\nos._exit(7)\n",
        7,
        "ok\n",
    ),
    "a child that ends as scripts do": (
        (
            "import os, sys, torch\ntorch.ones(9) + 1\nif os.fork() == 0:\n    torch.ones(5)\n    sys.exit(3)\n"
            "print(os.waitstatus_to_exitcode(os.wait()[1]), torch.ones(7).sum().item())\n"
        ),
        0,
        "3 7.0\n",
    ),
    "profilers and modes of its own": (
        """
import torch
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None): return func(*args, **(kwargs or {}))
model = torch.nn.Linear(64, 64)
with profile(profile_memory=True, with_stack=True) as p, Mode(), FlopCounterMode(display=False) as flops:
    model(torch.ones(2, 64)).sum().backward()
print(len(p.key_averages()) > 0, flops.get_total_flops())
""",
        0,
        "True 32768\n",
    ),
    "fake tensors of its own": (
        """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
kept = []
with FakeTensorMode(shape_env=ShapeEnv()):
    fake = torch.nn.Linear(4, 4)
    for _ in range(6):
        fake(torch.ones(2, 4)).sum().backward()
        kept.append(torch.ones(5))
real = torch.nn.Linear(4, 4)
sgd = torch.optim.SGD(real.parameters(), 0.1)
for _ in range(6):
    real(torch.ones(2, 4)).sum().backward(); sgd.step(); kept.append(torch.ones(9) * 2)
print("ok")
""",
        0,
        "ok\n",
    ),
    "models in several threads": (
        """
import threading, torch
models = [torch.nn.Linear(8, 8) for _ in range(4)]
def work(model):
    for _ in range(5):
        model(torch.ones(4, 8)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.0).step()
threads = [threading.Thread(target=work, args=(model,)) for model in models]
for thread in threads: thread.start()
work(models[0])
for thread in threads: thread.join()
print("ok")
""",
        0,
        "ok\n",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_script_runs_as_without_and_leaves_a_ledger(name, tmp_path):
    text, code, printed = ODD[name]
    (tmp_path / "odd.py").write_text(text)
    command = [sys.executable, "-m", "evenload", "track", "--stacks", "--owners", "odd.py"]
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert (ran.returncode, ran.stdout) == (code, printed), ran.stderr
    assert "Traceback" not in ran.stderr
    assert "broke off" not in ran.stderr
    assert "failed" not in ran.stderr
    assert ran.stderr.count("wrote odd.ledger") == (0 if code else 1)
    assert len(read_ledger(tmp_path / "odd.ledger").allocations) > 0
