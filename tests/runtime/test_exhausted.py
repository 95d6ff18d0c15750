"""Out of memory: every rank that is says what it held, beside what was predicted, and all ranks end."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.running import SOURCE, TEXT, Run, write_plan

from evenload.errors import EvenloadError
from evenload.runtime.exhausted import Exhausted, explained, message_of, room
from evenload.runtime.memory import RankMemory

MIB = 1 << 20
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1048576 bytes. Error code 12 (Cannot allocate memory)"
)
GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 77.80 GiB memory in use."
)
NARROW = """
import os, resource, torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        if type(x) is torch.Tensor and os.environ["RANK"] == "1":
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            if most == resource.RLIM_INFINITY:
                pages = int(open("/proc/self/statm").read().split()[0])
                limit = pages * resource.getpagesize() + (100 << 20)
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return x + self.inner(x).relu()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList([Layer() for _ in range(5)])
        self.out = nn.Linear(64, 256)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

def build():
    return Model()
"""
"""A model whose second rank may have 100 MiB when its first step begins."""


@pytest.mark.slow
def test_a_rank_without_memory_says_what_held_it_and_all_end(tmp_path):
    (tmp_path / "narrow.py").write_text(NARROW)
    plan = write_plan(tmp_path, [2, 3], micro_batch=64, seq=512)
    plan.write_text(plan.read_text().replace("model-5.json", "narrow:build"))
    (tmp_path / "text.txt").write_text(TEXT * 20)
    run = Run(2, tmp_path, plan, "--data", "text.txt", "--steps", 9, PYTHONPATH=f"{SOURCE}:{tmp_path}").wait(120)
    assert run.codes == [1, 1], run.outputs
    assert "rank 0 lost another rank" in run.outputs[0]
    said = run.outputs[1]
    assert "error: rank 1 (layers 2-4) in step 1 is out of memory, in forward, micro-batch 0: DefaultCPU" in said
    held, most, predicted, missed = said.splitlines()[1:5]
    assert "MiB activation" in held
    assert "32.00 MiB more had no room" in held
    assert "activation of blocks.*" in most
    assert predicted.startswith("  predicted   201.")
    assert missed.startswith("  missed      nothing: there was room for less than the 201.")
    assert "give each rank more than 201." in said
    assert "Traceback" not in said
    assert (tmp_path / "evenload-memory.json").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(HOST), "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes"),
        (torch.OutOfMemoryError(GPU), "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (MemoryError(), "Python found no memory"),
    ],
)
def test_memory_that_runs_out_is_known_behind_other_errors(error, said):
    assert message_of(error).startswith(said)
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("[Stage 1] failed to run forward") from error
    assert message_of(caught.value).startswith(said)


def test_other_errors_are_not_about_memory():
    assert message_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert message_of(None) is None


def test_what_is_held_beyond_the_prediction_is_named():
    found = Exhausted(message="no room", asked=MIB, held={"activation": 30 * MIB, "parameter": 10 * MIB})
    predicted = RankMemory(
        rank=3, predicted=20 * MIB, predicted_first=5, held={"activation": 8 * MIB, "parameter": 10 * MIB}
    )
    error = explained(found, predicted, "rank 3 (layers 0-1) in step 7")
    assert error.exit_code == 1
    assert "missed      21.00 MiB that the prediction does not have: 22.00 MiB activation more" in error.fact
    assert "evenload track" in error.fix


def test_without_a_prediction_only_what_is_held_is_told():
    found = Exhausted(message="no room", asked=None, held={"parameter": MIB})
    error = explained(found, RankMemory(rank=0, why="it reads data"), "rank 0 (layers 0-1) in step 1")
    assert "held        1.00 MiB: 1.00 MiB parameter" in error.fact
    assert "predicted   nothing: it reads data" in error.fact


def test_room_names_the_rank_and_lets_other_errors_through(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    with pytest.raises(EvenloadError, match="rank 5 is out of memory while it") as caught, room("while it loads"):
        raise RuntimeError(HOST)
    assert caught.value.exit_code == 1
    with pytest.raises(RuntimeError, match="another"), room("while it loads"):
        raise RuntimeError("another")
