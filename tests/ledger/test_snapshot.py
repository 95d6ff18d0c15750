"""Snapshots of the CUDA allocator: peaks, lives, lines, phases, categories, against an allocator that counts itself."""

import random

import pytest
from tests.ledger.snapshots import BACKWARD, FORWARD, MAIN, USER, Pretended, dump, frame, snapshot, training

from evenload.errors import EvenloadError
from evenload.ledger.curve import by_category, curve, live, peaks
from evenload.ledger.ledger import ALIVE
from evenload.ledger.snapshot import read_snapshot, snapshot_ledger
from evenload.ledger.words import CATEGORIES, PHASES, Category, MarkKind, Phase, Role


def random_run(seed, events=400):
    rng = random.Random(seed)
    gpu = Pretended()
    for _ in range(events):
        if gpu.live and rng.random() < 0.48:
            gpu.free(rng.choice(list(gpu.live)))
        elif rng.random() < 0.02:
            gpu.empty_cache()
        else:
            gpu.alloc(rng.randint(1, 10**6), rng.choice([FORWARD, BACKWARD, MAIN, ()]))
    return gpu


@pytest.mark.parametrize("seed", range(6))
def test_peaks_and_the_end_are_those_of_the_allocator(tmp_path, seed):
    gpu = random_run(seed)
    ledger = read_snapshot(dump(tmp_path / "snap.pickle", snapshot(gpu)))
    assert peaks(ledger).held == gpu.peak
    assert peaks(ledger).reserved == gpu.most
    assert curve(ledger).at(ledger.end) == gpu.held
    assert len(live(ledger, ledger.end)) == len(gpu.live)
    assert ledger.device == "cuda:0"


@pytest.mark.parametrize("kept", [0, 1, 50, 333, 10**6])
def test_what_is_older_than_the_events_is_still_there(kept):
    """The allocator keeps the last events only; blocks that no event made are found in the segments."""
    gpu = random_run(9)
    gpu.trace = gpu.trace[-kept:] if kept else []
    ledger = snapshot_ledger(snapshot(gpu))
    assert curve(ledger).at(ledger.end) == gpu.held
    assert peaks(ledger).held <= gpu.peak
    assert peaks(ledger).reserved <= gpu.most
    before = [row for row in range(len(ledger.allocations)) if ledger.allocations.roles[row] & Role.BEFORE.value]
    assert bool(before) == (kept < 10**6)
    if kept == 1:
        assert any("older than the events" in notice.fact for notice in ledger.notices)


def test_a_free_that_the_trace_has_lost_ends_with_the_next_use_of_the_address():
    gpu = Pretended()
    gpu.alloc(100)
    gpu.trace += [dict(gpu.trace[-1], size=70)]
    ledger = snapshot_ledger({"device_traces": [gpu.trace]})
    assert ledger.allocations.freed.tolist() == [3, ALIVE]


def test_lines_are_the_users_own_and_the_operator_is_pytorchs():
    gpu = Pretended()
    gpu.alloc(1000, FORWARD)
    ledger = snapshot_ledger(snapshot(gpu))
    assert ledger.source(0) == f"{USER}:12 forward"
    assert ledger.stack(0)[-1] == f"{USER}:60 <module>"
    assert ledger.operator(0) == "silu"


def test_phases_steps_and_categories_follow_from_the_lines():
    ledger = snapshot_ledger(snapshot(training(steps=3)))
    phases = [PHASES[mark.value] for mark in ledger.marks if mark.kind is MarkKind.PHASE]
    per_step = [Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER]
    assert phases == per_step * 3
    assert len(ledger.step_begins) == 3
    sizes = {
        category: sorted(
            ledger.allocations.nbytes[row]
            for row in range(len(ledger.allocations))
            if CATEGORIES[ledger.allocations.category[row]] is category
        )
        for category in Category
    }
    assert sizes[Category.PARAMETER] == [40_000, 60_000]
    assert sizes[Category.ACTIVATION] == [5000] * 3 + [7000] * 3
    assert sizes[Category.GRADIENT] == [40_000] * 6
    assert sizes[Category.OPTIMIZER] == [80_000]
    assert sizes[Category.TEMPORARY] == [900] * 3 + [5000] * 6 + [40_000] * 3
    assert sizes[Category.UNKNOWN] == [8] * 3


def test_without_lines_nothing_is_guessed():
    gpu = Pretended()
    gpu.free(gpu.alloc(1000))
    gpu.alloc(500)
    ledger = snapshot_ledger(snapshot(gpu))
    assert by_category(ledger, live(ledger, ledger.end))[Category.UNKNOWN] == 500
    assert set(ledger.allocations.phase.tolist()) == {Phase.OTHER.code}
    assert "no Python lines" in ledger.notices[0].fact


def test_steps_of_a_profiler_are_believed():
    gpu = training(steps=2)
    times = [event["time_us"] for event in gpu.trace]
    annotations = [
        {"name": f"ProfilerStep#{number}", "stage": stage, "device": 0, "time_us": times[at]}
        for number, at in ((7, 0), (8, len(times) // 2))
        for stage in ("START", "END")
    ]
    ledger = snapshot_ledger(snapshot(gpu, annotations=annotations))
    steps = [mark for mark in ledger.marks if mark.kind is MarkKind.STEP]
    assert [mark.value for mark in steps] == [7, 8]
    assert steps[0].index <= 2


def test_the_busiest_device_is_taken_unless_another_is_asked_for():
    small, large = Pretended(0), Pretended(2)
    small.alloc(100)
    for _ in range(3):
        large.alloc(1000)
    value = snapshot(small, large)
    assert snapshot_ledger(value).device == "cuda:2"
    assert peaks(snapshot_ledger(value, device=0)).held == 100
    with pytest.raises(EvenloadError, match=r"no device 1(.|\n)*devices in it: 0, 2"):
        snapshot_ledger(value, device=1)


def test_only_segments_are_enough():
    gpu = random_run(3)
    for value in (gpu.segments(), {"segments": gpu.segments()}):
        ledger = snapshot_ledger(value)
        assert peaks(ledger).held == gpu.held
        assert peaks(ledger).reserved == gpu.reserved


def test_blocks_as_old_versions_wrote_them_are_read():
    """PyTorch 2.0: no addresses of blocks, a history instead of frames."""
    blocks = [
        {"size": 512, "state": "active_allocated", "history": [{"addr": 4096, "real_size": 500, "frames": MAIN}]},
        {"size": 1024, "state": "inactive"},
        {"size": 2048, "state": "active_awaiting_free"},
    ]
    ledger = snapshot_ledger([{"device": 0, "address": 4096, "total_size": 2**21, "blocks": blocks}])
    assert sorted(ledger.allocations.nbytes.tolist()) == [512, 2048]
    assert any(ledger.source(row) == f"{USER}:40 main" for row in range(2))


def test_a_failed_allocation_is_marked():
    gpu = Pretended()
    gpu.alloc(100)
    gpu.event("oom", 77, 4096)
    [mark] = [mark for mark in snapshot_ledger(snapshot(gpu)).marks if mark.kind is MarkKind.FAILED]
    assert (mark.value, mark.text) == (4096, "out of memory: 4096 bytes asked for, 77 free on the device")


def test_notes_of_the_program_stand_for_the_module():
    gpu = Pretended()
    gpu.alloc(100, FORWARD, user_metadata="layers.3")
    assert snapshot_ledger(snapshot(gpu)).module(0) == "layers.3"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (5, "no memory snapshot"),
        ({}, "no memory snapshot"),
        ({"segments": 5}, "$.segments is no list"),
        ({"device_traces": [5]}, "$.device_traces[0] is no list"),
        ({"device_traces": [[{"action": "alloc"}, 7]]}, "$.device_traces[0][1] is no dictionary"),
        ({"device_traces": [[{"action": "alloc", "addr": 1, "size": "big"}]]}, "size is 'big'"),
        ({"device_traces": [[{"action": "alloc", "addr": 1, "size": -5}]]}, "size is -5"),
        ({"segments": [{"device": 0, "blocks": [{"state": "active_allocated", "size": True}]}]}, "size is true"),
        ({"segments": [{"device": 10**5000}]}, "device is a number of more than 18 digits"),
        ({"segments": [{"blocks": [{"state": "active_allocated", "address": [], "size": 1}]}]}, "address is []"),
        ({"device_traces": [[{"action": [], "addr": 1, "size": 5}]]}, "action is []"),
        ({"segments": [], "device_traces": [[], []]}, "the snapshot is empty"),
    ],
)
def test_values_that_are_no_snapshot_are_wrong_input(value, says):
    with pytest.raises(EvenloadError) as caught:
        snapshot_ledger(value)
    assert says in str(caught.value)


@pytest.mark.slow
def test_a_large_snapshot_is_read_in_seconds(tmp_path):
    gpu = random_run(1, events=200_000)
    path = dump(tmp_path / "large.pickle", snapshot(gpu))
    assert peaks(read_snapshot(path)).held == gpu.peak


def test_frames_that_make_no_sense_are_left_out():
    gpu = Pretended()
    wrong = [frame("", 1, "x"), frame("a.cpp", 1, "x"), {"filename": 5}, 7, frame(USER, 10**5000, "x")]
    gpu.alloc(100, [*wrong, frame(USER, 3, "f")])
    gpu.trace[-1]["time_us"] = 10**5000
    assert snapshot_ledger(snapshot(gpu)).stack(0) == (f"{USER}:3 f",)
