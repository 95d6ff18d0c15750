"""What is not released, found in real runs: every class twice, every control silent."""

import gc
import os
import re
import subprocess
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.record import leaks
from tests.record.training import llama

import evenload
from evenload.ledger.files import read_ledger
from evenload.ledger.growth import LeakClass, growth
from evenload.units import MIB

STEPS = 8
SRC = str(Path(evenload.__file__).parents[1])


@contextmanager
def collector_off():
    """The collector runs where a test says so, and not in the middle of a step."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run(body, *, steps=STEPS, **options):
    """What a recording of some steps says is not released, the collector off in between."""
    with collector_off(), evenload.record(stacks=True, **options) as recording:
        for step in range(steps):
            body(step)
            recording.step()
    return growth(recording.ledger)


@pytest.fixture(autouse=True)
def clean():
    yield
    leaks.HISTORY.clear()
    leaks.ERRORS.clear()
    leaks.unbounded.cache_clear()
    leaks.bounded.cache_clear()


def line_of(text):
    """`file:line` of the first line of the leaking programs that holds a text."""
    lines = Path(leaks.__file__).read_text().splitlines()
    return f"{leaks.__file__}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


CYCLES = [
    (leaks.keeps_output, 2, "Keeps.*kept", "ctx.kept = y"),
    (leaks.keeps_output_with_backward, 3, "Keeps.*kept", "ctx.kept = y"),
    (leaks.holds_itself, 1, "Holder.me", "self.tensor = torch.ones(512, 512)"),
    (leaks.module_with_lambda, 1, "WithLambda.f.self", "self.layer = nn.Linear"),
    (leaks.keeps_exception_in_itself, 1, "kept of keeps_exception_in_itself", "def keeps_exception_in_itself"),
]
RETAINED = [
    (leaks.appends_to_global, 1, r"HISTORY\[\d\]\['loss'\] \(global of tests.record.leaks\)", "HISTORY = []"),
    (leaks.stores_exception, 1, r"ERRORS\[\d\]\.__traceback__", "def stores_exception"),
    (leaks.unbounded, 1, r"unbounded", None),
]
UNCOLLECTABLE = [
    (leaks.identity_hooks, 2, "ExpBackward0", None),
    (leaks.graph_of_gradients, 2, "PowBackward0", None),
]


def matches(pattern, text):
    return re.search(pattern, text) is not None


@pytest.mark.parametrize(("body", "mib", "owner", "place"), CYCLES, ids=lambda one: getattr(one, "__name__", ""))
def test_a_cycle_is_found_with_its_owner_and_its_rate(body, mib, owner, place):
    [one] = run(body)
    assert one.leak is LeakClass.CYCLE
    assert one.per_step == pytest.approx(mib * MIB, rel=0.02)
    assert matches(owner, one.owner), one.owner
    assert one.source.partition(":")[0] == leaks.__file__
    if "def " not in place:
        assert one.source == line_of(place)


@pytest.mark.parametrize(("body", "mib", "owner", "place"), RETAINED, ids=lambda one: getattr(one, "__name__", ""))
def test_what_a_variable_retains_is_found_with_its_name(body, mib, owner, place):
    [one] = run(body)
    assert one.leak is LeakClass.RETAINED
    assert one.per_step == pytest.approx(mib * MIB, rel=0.02)
    assert matches(owner, one.owner), one.owner
    if place and "def " not in place:
        assert one.source == line_of(place)


@pytest.mark.parametrize(("body", "mib", "owner", "place"), UNCOLLECTABLE, ids=lambda one: getattr(one, "__name__", ""))
def test_what_nothing_reaches_and_the_collector_leaves_is_found(body, mib, owner, place):
    found = run(body)
    assert {one.leak for one in found} == {LeakClass.UNCOLLECTABLE}
    assert sum(one.per_step for one in found) == pytest.approx(mib * MIB, rel=0.02)
    assert any(matches(owner, one.owner) for one in found)


HEALTHY = [
    leaks.saves_output,
    leaks.keeps_input,
    leaks.holds_itself_weakly,
    leaks.module_without_lambda,
    leaks.handles_exception,
    leaks.stores_text_of_exception,
    leaks.detaching_hooks,
    leaks.gradients_by_grad,
    leaks.bounded,
]


@pytest.mark.parametrize("body", HEALTHY, ids=lambda one: getattr(one, "__name__", ""))
def test_healthy_programs_raise_no_alarm(body):
    assert run(body) == ()


def test_an_attribute_of_an_object_in_a_running_function_is_named():
    trainer = leaks.Trainer()
    [one] = run(lambda step: trainer.keep())
    assert matches(r"trainer\.outputs\[\d\] \(variable of test_an_attribute", one.owner)
    assert one.source == line_of("self.outputs = []")


def test_a_bounded_buffer_that_is_not_full_raises_no_alarm():
    trainer = leaks.Trainer()
    assert run(lambda step: trainer.keep_recent()) == ()


def test_accumulated_loss_holds_its_graph_only_without_backward():
    w = torch.ones(512, 512, requires_grad=True)
    total = [0]

    def without(step):
        h = (w * 1.5).sin()
        total[0] = total[0] + h.sum()

    def backward_first(step):
        h = (w * 1.5).sin()
        loss = h.sum()
        loss.backward()
        total[0] = total[0] + loss

    def number(step):
        total[0] += (w * 1.5).sin().sum().item()

    [one] = run(without)
    assert one.leak is LeakClass.RETAINED
    assert one.per_step == MIB
    assert matches(r"total\[0\] \(variable of test_accumulated\w+\) -> grad_fn AddBackward0", one.owner)
    assert ".item()" in one.fix
    total[0] = 0
    assert run(backward_first) == ()
    assert run(number) == ()


def test_a_view_shows_the_storage_that_it_keeps_alive():
    keep = []
    [one] = run(lambda step: keep.append(torch.empty(512, 512)[0]))
    assert (one.per_step, one.base, one.reach) == (MIB, MIB, 2048)
    assert ".clone()" in one.fix
    [one] = run(lambda step: keep.append(torch.empty(512, 512)[0].clone()))
    assert (one.per_step, one.base) == (2048, None)


@pytest.mark.parametrize(
    ("take", "owner"),
    [
        (lambda array, step: array, "kept[2].base"),
        (lambda array, step: array[0], "kept[2].base.base"),
        (lambda array, step: (step, {"rows": array}), "kept[2][1]['rows'].base"),
    ],
)
def test_arrays_over_tensors_are_found_although_the_collector_does_not_know_them(take, owner):
    """What an evaluation loop keeps: `outputs.append(out.cpu().numpy())`, where the device is the CPU already."""
    kept = []
    [one] = run(lambda step: kept.append(take(torch.ones(512, 512).numpy(), step)))
    assert (one.leak, one.per_step) == (LeakClass.RETAINED, MIB)
    assert one.owner.startswith(f"{owner} (variable of ")
    kept = []
    assert run(lambda step: kept.append(torch.ones(512, 512).numpy()[0].copy())) == ()


def test_hooks_that_fill_a_list_are_found():
    layer, outputs = torch.nn.Linear(512, 512), []
    handle = layer.register_forward_hook(lambda module, args, result: outputs.append(result))
    x = torch.ones(512, 512)
    [one] = run(lambda step: layer(x))
    assert one.owner.startswith("outputs[")
    handle.remove()
    assert run(lambda step: layer(x)) == ()


OUTSIDE = """
import sys, numpy as np, torch, evenload
from evenload.ledger.growth import growth
kept = []
bodies = {
    "arrays": lambda step: kept.append(np.ones(2**18)),
    "bytes": lambda step: kept.append(b"x" * 2**21),
    "healthy": lambda step: np.ones(2**18).sum(),
    "tensors that go": lambda step: torch.ones(2**19).sum(),
}
with evenload.record() as recording:
    for step in range(14):
        bodies[sys.argv[1]](step)
        recording.step()
print([(one.leak.value, round(one.per_step / 2**20, 1)) for one in growth(recording.ledger)])
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("arrays", "[('outside PyTorch', 2.0)]"),
        ("bytes", "[('outside PyTorch', 2.0)]"),
        ("healthy", "[]"),
        ("tensors that go", "[]"),
    ],
)
def test_growth_outside_pytorch_is_seen_in_the_resident_set(body, found):
    """In a process of its own: what this one has freed would serve for long."""
    program = [sys.executable, "-c", OUTSIDE, body]
    ran = subprocess.run(program, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": SRC})
    assert ran.stdout.strip() == found


def test_training_of_a_llama_raises_no_alarm():
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []

    def step(number):
        batch = torch.randint(0, 1024, (2, 32 + number))
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    assert run(step, model=model, optimizer=optimizer) == ()


def test_cycles_that_the_collector_frees_during_the_run_are_found():
    with collector_off(), evenload.record(stacks=True) as recording:
        for step in range(12):
            leaks.holds_itself(step)
            recording.step()
            if step % 4 == 3:
                gc.collect()
    [one] = growth(recording.ledger)
    assert one.leak is LeakClass.CYCLE
    assert (one.count, one.per_step) == (10, MIB)  # the first step and the last apart


def test_owners_are_in_the_file_and_the_program_is_left_alone(tmp_path):
    keep = []
    path = tmp_path / "run.ledger"
    run(lambda step: keep.append(torch.ones(512, 512)), path=path)
    [one] = growth(read_ledger(path))
    assert one.owner.startswith("keep[")
    storages = [tensor.untyped_storage() for tensor in keep]
    alive = [weakref.ref(storage) for storage in storages]
    del storages
    keep.clear()
    gc.collect()
    assert [one() for one in alive] == [None] * STEPS


def test_without_steps_a_loop_that_leaves_tensors_behind_is_found():
    with collector_off(), evenload.record(stacks=True) as recording:
        for step in range(10):
            leaks.keeps_output(step)
    [one] = growth(recording.ledger)
    assert (one.leak, one.per_step) == (LeakClass.CYCLE, None)
    assert one.nbytes >= 10 * MIB


def test_cycles_along_one_graph_are_all_cycles():
    def several(step):
        y = torch.ones(512, 512, requires_grad=True)
        for _ in range(3):
            y = leaks.Keeps.apply(y)

    [one] = run(several)
    assert one.leak is LeakClass.CYCLE
    assert one.per_step == 4 * MIB


def test_what_a_function_held_until_it_returned_is_found_with_its_variable():
    """A script keeps its lists in main(), which has returned when the recording ends."""

    def main(recording):
        outputs = []
        for _ in range(STEPS):
            outputs.append(torch.empty(512, 512)[0])
            recording.step()

    with evenload.record(stacks=True) as recording:
        main(recording)
    [one] = growth(recording.ledger)
    assert one.leak is LeakClass.RETAINED
    assert matches(r"outputs\[\d\] \(variable of test_what_a_function\w+\.<locals>\.main\)", one.owner)
    assert one.per_step == MIB


def test_what_a_function_holds_within_a_step_is_no_leak():
    def step():
        outputs = [torch.empty(512, 512) for _ in range(3)]
        return sum(output.sum() for output in outputs)

    with evenload.record(stacks=True) as recording:
        for _ in range(STEPS):
            step()
            recording.step()
    assert growth(recording.ledger) == ()
