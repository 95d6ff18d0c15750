"""A run of few layers for real, composed, is the run of all of them."""

import numpy as np
import pytest
import torch
from tests.record.events import signed_events
from tests.record.test_dedup import LLAMA, QWEN_MOE, rows
from torch import nn

from evenload.errors import EvenloadError
from evenload.ledger.curve import peaks
from evenload.ledger.words import MarkKind
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.record.dryrun import dryrun, real_run
from evenload.record.planned import prepare_plan
from evenload.record.process import resident_bytes
from evenload.setup import Setup

torch.set_num_threads(1)


def run(config, *, count=None, recompute=(), real=True, **options):
    plan = Plan(
        setup=Setup(seq=32, micro_batch=2),
        layout=Layout.even(config["num_hidden_layers"], pp=1),
        policy=Policy(full=frozenset(recompute)),
    )
    return prepare_plan(config, plan, device="cpu", real=real, count=count, **options)()


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LLAMA, {}),
        (LLAMA, {"recompute": range(9)}),
        (LLAMA, {"optimizer": "adamw-loop"}),
        (LLAMA, {"count": 6}),
        (QWEN_MOE, {}),
    ],
)
def test_few_real_layers_are_composed_to_the_real_run_of_all(config, options):
    few, full = run(config, **{"count": 4, **options}), run(config, **{**options, "count": None})
    np.testing.assert_array_equal(signed_events(few), signed_events(full))
    assert peaks(few).held == peaks(full).held
    assert rows(few) == rows(full)
    note = next(mark.text for mark in few.marks if mark.kind is MarkKind.NOTE)
    assert note.startswith("ran layers 0, 1, ")
    assert note.endswith(f"of {config['num_hidden_layers']} for real")


def test_a_real_run_is_the_dry_run_for_the_cpu():
    few = run(LLAMA, count=4)
    assert peaks(few).held == peaks(run(LLAMA, real=False)).held


class Choosing(nn.Module):
    """Works on as many rows as its data says."""

    def __init__(self, width=16):
        super().__init__()
        self.gate, self.inner = nn.Linear(width, 1), nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        chosen = (self.gate(x)[:, 0] > self.gate(x)[:, 0].median()).nonzero()[:, 0]
        return x.index_add(0, chosen, self.outer(self.inner(x[chosen]).relu()))


class Layered(nn.Module):
    def __init__(self, layers, *, width=16):
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList(layers)
        self.register_buffer("scale", torch.arange(1.0, width + 1))

    def forward(self, x):
        x = self.inlet(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def test_code_that_looks_at_its_data_runs_for_real():
    def build():
        return Layered(Choosing() for _ in range(10))

    inputs = torch.rand(64, 16)
    with pytest.raises(EvenloadError) as caught:
        dryrun(build, inputs=inputs)
    assert "--real" in caught.value.fix
    few, full = real_run(build, inputs=inputs, count=4), real_run(build, inputs=inputs)
    assert peaks(few).held == peaks(full).held


class Sizes(nn.Module):
    """Layers of one kind whose memory depends on data."""

    def __init__(self, share):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.rows = nn.Buffer(torch.tensor(share))

    def forward(self, x):
        rows = int(self.rows.item())
        return torch.cat([self.inner(x[:rows]).relu(), x[rows:]])


def test_layers_of_other_sizes_are_composed_with_a_warning():
    ledger = real_run(lambda: Layered(Sizes(10 + 5 * i) for i in range(8)), inputs=torch.rand(64, 16), count=4)
    assert any("did not need the same memory" in notice.fact for notice in ledger.notices)


def test_weights_of_layers_that_do_not_run_are_never_there():
    width = 2**14  # a GiB for every layer

    def build():
        return Layered((nn.Linear(width, width, bias=False) for _ in range(12)), width=width)

    before = resident_bytes()
    with pytest.raises(EvenloadError, match="3 layers cannot stand for 12"):
        real_run(build, inputs=torch.rand(1, 16), count=3)
    assert resident_bytes() - before < 2**28


def test_layers_that_do_different_things_are_refused_with_the_way_out():
    def build():
        model = Layered(nn.Linear(16, 16) for _ in range(8))
        model.inlet.weight = model.blocks[0].weight
        return model

    with pytest.raises(EvenloadError, match="look alike") as caught:
        real_run(build, inputs=torch.rand(8, 16), count=4)
    assert "--layers" in caught.value.fix


def test_weights_at_both_ends_stay_shared():
    class Tied(Layered):
        def __init__(self):
            super().__init__(nn.Linear(16, 16) for _ in range(8))
            self.outlet = nn.Linear(16, 16)
            self.outlet.weight = self.inlet.weight

        def forward(self, x):
            return self.outlet(super().forward(x))

    few, full = (real_run(Tied, inputs=torch.rand(8, 16), count=count) for count in (4, None))
    assert peaks(few).held == peaks(full).held
    assert rows(few) == rows(full)


@pytest.mark.parametrize(("device", "says"), [("cuda", "no cuda device here"), ("npu", "no npu device here")])
def test_a_device_that_is_not_there_is_named(device, says):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(EvenloadError, match=says):
        real_run(lambda: nn.Linear(4, 4), device=device, inputs=torch.rand(1, 4))


def test_few_real_layers_of_a_sequence_stand_for_all():
    def build():
        return nn.Sequential(nn.Linear(16, 16), *(Choosing() for _ in range(8)), nn.Linear(16, 16))

    few, full = (real_run(build, inputs=torch.rand(8, 16), count=count) for count in (6, None))
    assert peaks(few).held == peaks(full).held
    assert rows(few) == rows(full)
