"""Dry runs of ranks that do not exist: equal to real ranks, with local shapes and the collectives of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.runtime import pair
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from evenload.errors import EvenloadError
from evenload.ledger.curve import by_category, curve, live, peaks
from evenload.ledger.reading import decode
from evenload.ledger.words import CATEGORIES, Category
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute
from evenload.record.pieces import in_order
from evenload.runtime.collectives import alike
from evenload.runtime.dryrun import prepare_rank
from evenload.setup import Setup

torch.set_num_threads(1)
CONFIG = {**pair.SMALL, "model_type": "llama", "num_hidden_layers": 8, "num_key_value_heads": 4}


def plan(recompute="none", layers=8, **degrees):
    setup = Setup(**{"seq": 16, "micro_batch": 2, "dtype": "bf16", **degrees})
    return Plan(
        setup=setup,
        layout=Layout.even(layers, pp=setup.pp, interleave=setup.interleave),
        policy=Policy.everywhere(Recompute(recompute), layers),
    )


def events(ledger):
    """What is allocated, in no order and without categories, which follow from when gloo's threads let go of it."""
    rows = ledger.allocations
    return Counter(
        (
            int(rows.nbytes[row]),
            ledger.module(row),
            int(rows.phase[row]),
            int(rows.micro_batch[row]),
        )
        for row in np.flatnonzero(ledger.on_device)
    )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", pair.RUNS)
def test_the_ledger_of_a_real_rank_is_that_of_its_dry_run(both, name, recompute):
    for rank, results in enumerate(both("recorded")):
        real = decode(results[name, recompute])
        run = prepare_rank(pair.CONFIG, pair.plan_of(name, recompute), rank=rank, device="cpu")()
        dry = run.ledger
        late = peaks(real).held - peaks(dry).held  # gloo's thread lets go of a collective's input when it likes
        if name in ("tensor", "sequence"):
            assert 0 <= late <= 0.005 * peaks(dry).held
        else:
            scattered = [one.nbytes // one.count for one in alike(run.collectives) if one.name == "reduce_scatter"]
            assert 0 <= late <= max(scattered, default=0)
        assert (dry.metadata.rank, dry.metadata.world) == (rank, 2)
        if name != "ddp":  # which deals its buckets anew after the first step
            assert events(real) == events(dry)
        resident = [by_category(ledger, live(ledger, ledger.end)) for ledger in (real, dry)]
        assert resident[0] == resident[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "recompute"),
    [
        ({"tp": 4, "sequence_parallel": True}, "full"),
        ({"dp": 8, "zero": 3}, "none"),
        ({"dp": 8, "zero": 3}, "full"),
        ({"tp": 2, "dp": 4, "zero": 3}, "none"),
    ],
)
def test_few_layers_stand_for_all_on_a_rank_too(degrees, recompute):
    few, whole = (prepare_rank(CONFIG, plan(recompute, **degrees), rank=3, full=full)() for full in (False, True))
    assert any("traced layers" in (mark.text or "") for mark in few.ledger.marks)
    assert np.array_equal(curve(few.ledger).level, curve(in_order(whole.ledger)).level)
    assert events(few.ledger) == events(whole.ledger)
    assert alike(few.collectives) == alike(whole.collectives)


@pytest.mark.parametrize("world", [8, 64])
def test_a_rank_of_many_holds_its_share(world):
    config = {
        **CONFIG,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "vocab_size": 1024,
        "head_dim": 16,
        "num_hidden_layers": 2,
    }
    alone = prepare_rank(config, plan(layers=2, dp=1), rank=0)().ledger
    shared = prepare_rank(config, plan(layers=2, dp=world, zero=3), rank=world - 1)().ledger
    whole, part = (by_category(ledger, live(ledger, ledger.end)) for ledger in (alone, shared))
    for category in (Category.PARAMETER, Category.OPTIMIZER):
        assert part[category] == pytest.approx(whole[category] / world, rel=0.001)
    assert shared.metadata.world == world


def test_the_collectives_of_sequence_parallelism_are_those_of_the_paper():
    """Two gathers and two scatters a layer in forward, and their opposites in backward, of the whole hidden states."""
    run = prepare_rank(CONFIG, plan(tp=4, sequence_parallel=True), rank=1)()
    hidden = 2 * 16 * 32 * 2  # sequences, tokens, width, bytes
    layers = [one for one in alike(run.collectives) if (one.module or "").startswith("model.layers")]
    in_forward = {(one.name, one.module.rpartition(".")[2]): one for one in layers if one.phase == "forward"}
    assert set(in_forward) == {(n, m) for n in ("all_gather", "reduce_scatter") for m in ("self_attn", "mlp")}
    for one in layers:
        if one.name in ("all_gather", "reduce_scatter"):
            assert (one.ranks, one.count, one.nbytes) == (4, 8, 8 * hidden)
    assert sum(one.count for one in layers if one.phase == "backward" and one.name == "reduce_scatter") == 16


def test_a_step_with_recomputation_gathers_again():
    phases = {}
    for recompute in ("none", "full"):
        run = prepare_rank(CONFIG, plan(recompute, tp=4, sequence_parallel=True))()
        phases[recompute] = Counter(one.phase for one in run.collectives)
    assert phases["none"]["recompute"] == 0
    assert phases["full"]["recompute"] >= 8 * 3  # the last scatter of a layer makes nothing that backward needs


def test_single_operators_are_recomputed_by_the_engine():
    held = {
        recompute: peaks(prepare_rank(CONFIG, plan(recompute, seq=64, dp=2, zero=3))().ledger).held
        for recompute in ("none", "select", "full")
    }
    assert held["full"] < held["select"] < held["none"]


def test_what_collectives_write_is_a_communication_buffer():
    ledger = prepare_rank(CONFIG, plan(dp=4, zero=3))().ledger
    rows = ledger.allocations
    gathered = [row for row in range(len(rows)) if ledger.operator(row) == "storage.resize_"]
    assert gathered
    assert {CATEGORIES[rows.category[row]] for row in gathered} == {Category.COMMUNICATION}


@pytest.mark.parametrize(
    ("degrees", "options", "changes", "told"),
    [
        ({"dp": 2, "zero": 3}, {"rank": 2}, {}, "there is no rank 2 of 2"),
        ({"dp": 2, "zero": 3}, {"rank": -1}, {}, "there is no rank -1 of 2"),
        ({"tp": 2}, {"rank": True}, {}, "there is no rank True of 2"),
        ({"dp": 2, "zero": 1}, {}, {}, "zero is 1"),
        ({"cp": 2}, {}, {}, "cp is 2"),
        ({"pp": 2}, {}, {}, "1f1b cannot run so: it needs as many micro-batches as stages, 2, and has 1"),
        ({"pp": 2, "dp": 2, "micro_batches": 2}, {}, {}, "zero is 0"),
        ({"pp": 2, "schedule": "mindspore_interleaved"}, {}, {}, "has no schedule"),
        ({"pp": 2, "micro_batches": 2}, {"rank": 2}, {}, "there is no rank 2 of 2"),
        ({"dp": 2, "ep": 2, "zero": 3}, {}, {}, "ep is 2"),
        ({"tp": 2, "backend": "megatron"}, {}, {}, "backend is megatron"),
        ({"tp": 2}, {}, {"model_type": "qwen3_moe"}, "layer 0.mlp, a mixture of experts"),
        ({"tp": 8}, {}, {}, "tp 8 does not divide the 4 heads of layer 0.self_attn.q_proj"),
        ({"tp": 4}, {}, {"vocab_size": 130}, "tp 4 does not divide the 130 rows of the embedding"),
    ],
)
def test_what_cannot_run_is_told(degrees, options, changes, told):
    with pytest.raises(EvenloadError) as error:
        prepare_rank({**CONFIG, **changes}, plan(**degrees), **options)()
    assert told in str(error.value)
    assert error.value.fix
    assert not distributed.is_initialized()


def test_a_process_of_a_real_run_cannot_stand_for_another_rank():
    go = prepare_rank(CONFIG, plan(tp=2))
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(EvenloadError, match="belongs to a process group already"):
            go()
    finally:
        distributed.destroy_process_group()


def test_nothing_of_a_simulated_rank_stays_behind():
    first = prepare_rank(CONFIG, plan(tp=2, dp=2, zero=3))
    second = prepare_rank(CONFIG, replace(plan(), setup=replace(plan().setup, dp=8, zero=3)), rank=7)
    one = first().ledger
    second()
    again = first().ledger
    assert np.array_equal(curve(one).level, curve(again).level)
