"""Code of every kind runs as before inside a recording, and is counted sensibly."""

import contextlib
import copy
import io
import os
import threading

import numpy as np
import pytest
import torch
from torch import nn

import evenload
from evenload.ledger.files import read_ledger
from evenload.ledger.words import PHASES, Category, MarkKind, Phase

torch.set_num_threads(1)


class Wrapper(torch.Tensor):
    """Holds another tensor, has no memory of its own, and does not say what it holds."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(*[arg.inner if isinstance(arg, cls) else arg for arg in args], **(kwargs or {})))


def attention_step():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    layer(torch.ones(1, 4, 8)).sum().backward()
    layer.eval()(torch.ones(1, 4, 8))


def lbfgs():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum() ** 2
        loss.backward()
        return loss

    optimizer.step(closure)


def scaled():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def loaded():
    buffer = io.BytesIO()
    torch.save(nn.Linear(9, 9).state_dict(), buffer)
    buffer.seek(0)
    torch.load(buffer)


def jagged():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, requires_grad=True)
    (nested * 2).values().sum().backward()


def sparse():
    matrix = torch.eye(4).to_sparse().requires_grad_()
    torch.sparse.mm(matrix, torch.ones(4, 4)).sum().backward()
    torch.eye(4).to_sparse_csr() @ torch.ones(4, 4)


def compiled():
    torch.compile(lambda x: (x @ x).relu(), fullgraph=True, backend="eager")(torch.ones(3, 3))


RUNS = {
    "vmap": lambda: torch.func.vmap(torch.func.grad(lambda x: (x**2).sum()))(torch.ones(5, 3)),
    "forward mode": lambda: torch.func.jvp(lambda x: x**2, (torch.ones(3),), (torch.ones(3),)),
    "lazy modules": lambda: nn.LazyLinear(3)(torch.ones(2, 4)).sum().backward(),
    "jagged tensors": jagged,
    "sparse tensors": sparse,
    "opaque tensors": lambda: torch.ones(3, 3).to_mkldnn() + torch.ones(3, 3).to_mkldnn(),
    "saving and loading": loaded,
    "copies": lambda: copy.deepcopy(nn.Linear(3, 3)),
    "a closure": lbfgs,
    "a scaler": scaled,
    "scripted modules": lambda: torch.jit.script(nn.Linear(3, 3))(torch.ones(1, 3)).sum().backward(),
    "compiled functions": compiled,
    "recurrent networks": lambda: nn.LSTM(4, 4)(torch.ones(3, 1, 4))[0].sum().backward(),
    "transformer layers": attention_step,
    "random states": lambda: torch.set_rng_state(torch.get_rng_state()),
    "shared memory": lambda: torch.ones(3).share_memory_().add_(1),
    "complex numbers": lambda: torch.fft.fft(torch.ones(8)).abs(),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_as_before(name):
    with evenload.record(stacks=True) as recording:
        RUNS[name]()
    ledger = recording.ledger
    assert len(ledger.allocations) > 0
    rows = ledger.allocations
    assert (rows.last_used <= rows.freed).all()


def test_tensors_without_memory_are_not_counted():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with evenload.record() as recording:
        nn.Linear(1000, 1000, device="meta")(torch.ones(2, 1000, device="meta"))
        with FakeTensorMode():
            nn.Linear(1000, 1000)(torch.ones(2, 1000)).sum().backward()
    assert len(recording.ledger.allocations) == 0


def test_a_wrapper_is_what_it_holds():
    with evenload.record() as recording:
        wrapped = Wrapper(torch.ones(100))
        wrapped = wrapped + wrapped
        module = nn.Module()
        module.weight = nn.Parameter(wrapped, requires_grad=False)
    assert recording.ledger.allocations.nbytes.tolist() == [400, 400]


def test_another_threads_model_does_not_disturb_the_phases():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    begun, go_on = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x):
            begun.set()
            go_on.wait(10)
            return x

    other = threading.Thread(target=lambda: Slow()(torch.ones(3)))
    with evenload.record(model=model) as recording:
        other.start()
        begun.wait(10)
        loss = model(torch.ones(2, 3)).sum()
        go_on.set()
        other.join()
        loss.backward()
    ledger = recording.ledger
    modules = {ledger.module(row) for row in range(len(ledger.allocations))}
    assert modules <= {"0", "1", "", None}
    marks = [PHASES[mark.value] for mark in ledger.marks if mark.kind is MarkKind.PHASE]
    assert marks == [Phase.FORWARD, Phase.BACKWARD, Phase.OTHER]
    assert ["ran in another thread" in notice.fact for notice in recording.notices] == [True]


def test_errors_in_forward_and_backward_leave_the_phases_right():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    good = nn.Linear(3, 1)
    with evenload.record() as recording:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3))
        output = good(torch.ones(2, 3))
        output.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        torch.ones(5)
        good(torch.ones(2, 3)).sum().backward()
    ledger = recording.ledger
    (five,) = np.flatnonzero(ledger.allocations.nbytes == 20)
    assert PHASES[ledger.allocations.phase[five]] is Phase.OTHER
    assert ledger.module(five) is None
    gradients = np.flatnonzero(ledger.allocations.category == Category.GRADIENT.code)
    assert {ledger.module(row) for row in gradients} == {"Linear"}


def test_a_recording_inside_another_one_sees_the_same():
    with evenload.record() as outer, evenload.record() as inner:
        nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
    for name in ("nbytes", "phase", "category"):
        ours, theirs = (getattr(recording.ledger.allocations, name) for recording in (outer, inner))
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_synchronizing_waits_for_the_device_after_every_operator(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    with evenload.record(synchronize=True):
        torch.ones(3).view(3).add(1).mul_(2)
    assert len(waits) == 3
    waits.clear()
    with evenload.record():
        torch.ones(3)
    assert waits == []


def test_a_batch_from_another_thread_is_new_when_it_comes_in_a_later_step():
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenload.record(model=model) as recording:
        for _ in range(2):
            batch = []
            maker = threading.Thread(target=lambda batch=batch: batch.append(torch.ones(700, 3)))
            maker.start()
            maker.join()
            model(batch[0]).sum().backward()
            sgd.step()
    rows = recording.ledger.allocations
    batches = np.flatnonzero(rows.nbytes == 700 * 3 * 4)
    assert rows.allocated[batches[0]] == 0
    assert rows.allocated[batches[1]] > recording.ledger.step_begins[1]
    assert (rows.category[batches] == Category.INPUT.code).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_child_writes_nothing_into_the_ledger(tmp_path):
    path = tmp_path / "run.ledger"
    go, gone = os.pipe(), os.pipe()
    with evenload.record(path=path) as recording:
        torch.ones(3)
        child = os.fork()
        if child == 0:
            os.read(go[0], 1)
            torch.arange(10).flip(0).sort()  # operators that the parent has not seen, where it has written meanwhile
            with contextlib.suppress(Exception):
                nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()
            os.write(gone[1], b".")
            os._exit(0)
        kept = [torch.ones(3) + number for number in range(20)]
        os.write(go[1], b".")
        os.read(gone[0], 1)
        os.waitpid(child, 0)
    ledger = recording.ledger
    assert len(ledger.allocations) == 1 + 2 * len(kept)
    assert {ledger.operator(row) for row in range(len(ledger.allocations))} == {"aten.ones", "aten.add.Tensor"}
    assert read_ledger(path).complete


def test_waiting_for_a_fake_collective_makes_nothing():
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed import _functional_collectives as collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from evenload.ledger.ledger import Metadata
    from evenload.ledger.log import Log
    from evenload.record.core import Core

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        with FakeTensorMode():
            core = Core(Log(Metadata(evenload="1")), fake=True, devices={"cpu": "cuda"})
            core.begin()
            try:
                reduced = collectives.all_reduce(torch.ones(10), "sum", dist.group.WORLD)
                kept = reduced + 1
            finally:
                core.end()
            ledger = core.log.ledger(core.storages.settle())
    finally:
        dist.destroy_process_group()
    operators = [ledger.operator(row) for row in range(len(ledger.allocations))]
    assert operators == ["aten.ones", "_c10d_functional.all_reduce", "aten.add.Tensor"]
    assert ledger.devices == ("cuda",)
    assert ledger.on_device.all()
    assert kept.numel() == 10
