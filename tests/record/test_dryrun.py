"""A dry run for the CPU is the real run on the CPU, event for event; the profiler, which knows neither, agrees."""

import copy
import sys

import numpy as np
import pytest
import torch
from tests.record.events import signed_events
from tests.record.training import Stack, llama
from tests.record.truth import counted_twice, memray_peak
from torch import nn

import evenload
from evenload.errors import EvenloadError
from evenload.ledger.curve import by_category, curve, live
from evenload.ledger.words import Category

ADAMW = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}
RUNS = {
    "foreach": {},
    "loop": {"adamw": "loop"},
    "fused": {"adamw": "fused"},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": torch.bfloat16},
    "autocast and fused": {"autocast": torch.bfloat16, "adamw": "fused"},
    "gradient accumulation": {"micro_batches": 2},
    "eager attention": {"attn_implementation": "eager"},
    "checkpointing": {"checkpointing": True},
    "checkpointing with autocast": {"checkpointing": True, "autocast": torch.bfloat16, "adamw": "loop"},
    "reentrant checkpointing": {"checkpointing": "reentrant"},
}


def batch():
    tokens = torch.randint(0, 1024, (4, 64))
    return {"input_ids": tokens, "labels": tokens}


def build(*, dtype=None, **options):
    torch.manual_seed(0)
    model = llama(**options)
    return model if dtype is None else model.to(dtype)


def train(model, optimizer, *, autocast, micro_batches):
    """The built-in step, written out."""
    for _ in range(2):
        for _ in range(micro_batches):
            tokens = batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
                loss = model(**tokens).loss
            del tokens
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()


def both(*, adamw="foreach", autocast=None, micro_batches=1, **options):
    """The ledgers of a real and of a dry run on the CPU."""
    model = build(**options)
    optimizer = ADAMW[adamw](model.parameters())
    with evenload.record(model=model, optimizer=optimizer) as recording:
        train(model, optimizer, autocast=autocast, micro_batches=micro_batches)
    dry = evenload.dryrun(
        lambda: build(**options),
        device="cpu",
        inputs=batch,
        optimizer=ADAMW[adamw],
        micro_batches=micro_batches,
        autocast=autocast,
    )
    return recording.ledger, dry


@pytest.mark.parametrize("name", RUNS)
def test_a_dry_run_for_the_cpu_is_the_real_run_event_for_event(name):
    real, dry = both(**RUNS[name])
    np.testing.assert_array_equal(signed_events(dry), signed_events(real))
    assert len(signed_events(real)) > 1000
    assert curve(dry).peak == curve(real).peak
    at_peak = [by_category(ledger, live(ledger, curve(ledger).peak_index)) for ledger in (dry, real)]
    assert at_peak[0] == at_peak[1]


@pytest.mark.parametrize("name", [name for name in RUNS if name != "eager attention"])
def test_the_peak_of_a_dry_run_is_the_one_that_the_profiler_sees(name):
    options = {"autocast": None, "micro_batches": 1, **RUNS[name]}
    adamw, autocast, micro_batches = options.pop("adamw", "foreach"), options.pop("autocast"), options["micro_batches"]
    del options["micro_batches"]

    def run(_):
        model = build(**options)
        train(model, ADAMW[adamw](model.parameters()), autocast=autocast, micro_batches=micro_batches)

    truth = counted_twice(run).profiler_peak
    dry = evenload.dryrun(
        lambda: build(**options),
        device="cpu",
        inputs=batch,
        optimizer=ADAMW[adamw],
        micro_batches=micro_batches,
        autocast=autocast,
    )
    tolerance = 1e-4 * truth if "checkpointing" in name else 0
    assert 0 <= truth - curve(dry).peak <= tolerance


@pytest.mark.skipif(sys.platform != "linux", reason="memray follows the C library's allocator on Linux")
@pytest.mark.parametrize("adamw", ADAMW)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_a_dry_run_is_the_one_that_memray_sees(adamw, autocast, checkpointing):
    def run():
        model = build(checkpointing=checkpointing)
        train(model, ADAMW[adamw](model.parameters()), autocast=autocast, micro_batches=1)

    run()
    truth = memray_peak(run)
    dry = evenload.dryrun(
        lambda: build(checkpointing=checkpointing),
        device="cpu",
        inputs=batch,
        optimizer=ADAMW[adamw],
        autocast=autocast,
    )
    assert 0 <= truth - curve(dry).peak <= (1e-4 * truth if checkpointing else 0)  # scratch inside kernels


def test_a_model_that_is_passed_stays_as_it_is():
    model = Stack()
    before = copy.deepcopy(model.state_dict())
    ledger = evenload.dryrun(model, inputs=torch.randn(64, 32), device="cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and type(parameter) is nn.Parameter for parameter in model.parameters())
    built = evenload.dryrun(Stack, inputs=torch.randn(64, 32), device="cpu")
    np.testing.assert_array_equal(signed_events(ledger), signed_events(built))


def test_parameters_count_once_however_often_they_are_used():
    def build():
        model = nn.Sequential(nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50))
        model[2].weight = model[0].weight
        return model

    ledger = evenload.dryrun(build, inputs=torch.empty(4, 50))
    categories = by_category(ledger, live(ledger, curve(ledger).peak_index))
    assert categories[Category.PARAMETER] == 4 * (50 * 50 + 2 * 50)


def test_a_model_far_larger_than_this_host_needs_no_memory():
    def build():
        return nn.Sequential(*(nn.Linear(2**17, 2**17, bias=False, dtype=torch.bfloat16) for _ in range(8)))

    ledger = evenload.dryrun(build, inputs=torch.empty(1, 2**17, dtype=torch.bfloat16), optimizer="sgd")
    assert curve(ledger).peak > 8 * 2 * 2**35


def test_a_plain_network_of_convolutions_runs_with_the_step_of_the_user():
    def build():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)
        )

    def step(model, optimizer):
        images, labels = torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with evenload.record(model=model, optimizer=sgd) as recording:
        for _ in range(2):
            step(model, sgd)
    dry = evenload.dryrun(
        build, step, device="cpu", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    )
    np.testing.assert_array_equal(signed_events(dry), signed_events(recording.ledger))


def test_code_may_name_the_device_that_is_not_there():
    def step(model):
        model.cuda().to("cuda:0", torch.bfloat16)
        images = (
            torch.randn(16, 3, 16, 16, device="cuda", dtype=torch.bfloat16).pin_memory().to("cuda", non_blocking=True)
        )
        torch.cuda.synchronize()
        model(images).sum().backward()

    ledger = evenload.dryrun(lambda: nn.Conv2d(3, 8, 3, bias=False).half().cuda(), step, steps=1)
    assert ledger.device == "cuda:0"
    categories = by_category(ledger, ledger.on_device.nonzero()[0])
    assert categories[Category.INPUT] == 2 * 16 * 3 * 16 * 16
    assert categories[Category.GRADIENT] == 2 * 8 * 3 * 9


def test_step_counters_of_adamw_are_memory_of_the_host_on_an_accelerator():
    ledger = evenload.dryrun(lambda: nn.Linear(8, 8), inputs=torch.empty(1, 8))
    states = ledger.allocations.category == Category.OPTIMIZER.code
    assert ledger.allocations.nbytes[states & ~ledger.on_device].tolist() == [4, 4]
    assert ledger.allocations.nbytes[states & ledger.on_device].tolist() == [256, 256, 32, 32]
    fused = evenload.dryrun(lambda: nn.Linear(8, 8), inputs=torch.empty(1, 8), optimizer="adamw-fused")
    states = fused.allocations.category == Category.OPTIMIZER.code
    assert not np.any(states & ~fused.on_device)


def test_adamw_runs_foreach_on_an_accelerator_and_a_loop_on_the_cpu():
    def build():
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(10)))

    def temporaries(device):
        ledger = evenload.dryrun(build, inputs=torch.empty(1, 64), device=device)
        return by_category(ledger, live(ledger, curve(ledger).peak_index))[Category.TEMPORARY] // (64 * 64 * 4)

    assert (temporaries("cuda"), temporaries("cpu")) == (10, 3)
    assert torch.optim.AdamW(build().parameters()).defaults["foreach"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model_or_builder": 3}, "neither"),
        ({"model_or_builder": lambda: 3}, "no torch.nn.Module"),
        ({"step": "train"}, "step is a str"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"device": "cuda:x"}, "device is"),
        ({"device": None}, "device is"),
        ({"steps": True}, "steps is True"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"optimizer": "adam"}, "optimizer is 'adam'"),
        ({"optimizer": lambda parameters: 5}, "makes a int"),
        ({"inputs": None}, "nothing says what the model is called with"),
        ({"inputs": torch.empty(3, 5)}, "raised RuntimeError"),
        ({"loss": lambda returned: returned.detach().sum()}, "does not depend on a parameter"),
    ],
)
def test_a_wrong_argument_is_named(arguments, says):
    whole = {"model_or_builder": lambda: nn.Linear(8, 8), "inputs": torch.empty(1, 8), **arguments}
    with pytest.raises(EvenloadError, match=says):
        evenload.dryrun(whole.pop("model_or_builder"), **whole)


class Deciding(nn.Module):
    """Looks at its data."""

    def __init__(self, decide):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.decide = decide

    def forward(self, x):
        return self.decide(self.inner(x))


@pytest.mark.parametrize(
    ("decide", "operator"),
    [
        (lambda x: x[x > 0].sum(), "aten.nonzero"),
        (lambda x: x if x.sum().item() > 0 else -x, "aten._local_scalar_dense"),
        (lambda x: x[: int(x.abs().max())], "aten._local_scalar_dense"),
        (lambda x: x * x.unique().numel(), "aten._unique2"),
    ],
)
def test_an_operator_that_needs_data_is_named_with_the_way_out(decide, operator):
    with pytest.raises(EvenloadError) as caught:
        evenload.dryrun(lambda: Deciding(decide), inputs=torch.empty(1, 8))
    assert operator in caught.value.fact
    assert "needs the data" in caught.value.fact
    assert "evenload track" in caught.value.fix
    assert __file__ in caught.value.where
