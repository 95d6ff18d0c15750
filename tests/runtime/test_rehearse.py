"""Dry runs of one rank of a pipeline: equal to real ranks, with the buffers that PyTorch's stages keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.runtime import pair
from tests.runtime.test_dryrun import CONFIG, plan

from evenload.ledger.curve import live, peaks
from evenload.ledger.reading import decode
from evenload.ledger.words import Category, Phase
from evenload.runtime.dryrun import prepare_rank

torch.set_num_threads(1)
HIDDEN = 2 * 16 * 32 * 2
"""Sequences, tokens, width, bytes of what stages send."""


def received(ledger):
    """Receive buffers that are there when the second step begins."""
    rows = ledger.allocations
    there = live(ledger, int(ledger.step_begins[1]))
    return [row for row in there if rows.category[row] == Category.COMMUNICATION.code and rows.nbytes[row] == HIDDEN]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", pair.PIPELINES)
def test_the_peak_of_a_real_rank_is_that_of_its_dry_run(both, name, recompute):
    for rank, results in enumerate(both("recorded_pipelines")):
        real = decode(results[name, recompute])
        dry = prepare_rank(pair.DEEP, pair.pipeline_of(name, recompute), rank=rank, device="cpu")().ledger
        assert peaks(real).held == peaks(dry).held


def test_a_buffer_for_every_micro_batch_stays_from_the_first_step_on():
    for rank, directions in ((0, 1), (1, 2), (3, 1)):  # only gradients, both, only hidden states
        ledger = prepare_rank(CONFIG, plan(pp=4, micro_batches=6), rank=rank)().ledger
        assert len(received(ledger)) == 6 * directions


def test_modules_have_the_names_of_the_whole_model_and_micro_batches_their_numbers():
    ledger = prepare_rank(
        CONFIG, plan(pp=2, interleave=2, schedule="interleaved_1f1b", micro_batches=4), rank=1
    )().ledger
    rows = ledger.allocations
    names = {ledger.module(row) or "" for row in range(len(rows))}
    layers = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    assert layers == {2, 3, 6, 7}  # chunk 0 of stage 1, and chunk 1
    assert "lm_head" in names
    assert not any(name.startswith(("0.", "1.", "Chunk")) for name in names)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        own = [
            row
            for row in range(len(rows))
            if rows.phase[row] == phase.code and (ledger.module(row) or "").count(".") > 2
        ]
        assert set(rows.micro_batch[own].tolist()) == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [27, 63])
def test_a_rank_of_everything_at_once(rank):
    degrees = {"pp": 4, "interleave": 2, "tp": 2, "sequence_parallel": True, "dp": 8, "zero": 3}
    run = prepare_rank(CONFIG, plan("full", **degrees, schedule="interleaved_1f1b", micro_batches=8), rank=rank)()
    assert {(one.name, one.ranks) for one in run.collectives} >= {
        ("all_gather", 8),
        ("reduce_scatter", 8),
        ("all_gather", 2),
        ("reduce_scatter", 2),
        ("send", 4),
        ("receive", 4),
    }
    sent = [one.nbytes for one in run.collectives if one.name == "send"]
    assert set(sent) == {HIDDEN // 2}  # hidden states are divided along the sequence between stages too
    assert (run.ledger.metadata.rank, run.ledger.metadata.world) == (rank, 64)


@pytest.mark.slow
def test_what_is_sent_is_held_longer_where_the_schedule_waits_at_the_end():
    """PyTorch's schedules of several chunks wait for what they send when the step ends, so memory grows with it."""
    held = []
    for count in (4, 8):
        chosen = plan(pp=2, interleave=2, schedule="interleaved_1f1b", micro_batches=count)
        ledger = prepare_rank(CONFIG, chosen, rank=0)().ledger
        rows = ledger.allocations
        alive = live(ledger, int(peaks(ledger).at))
        held.append(int(np.sum(rows.nbytes[alive] == HIDDEN)))
    assert held[1] > held[0]
