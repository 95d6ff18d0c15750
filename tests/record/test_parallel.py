"""Recordings of two processes under torchrun: shards, gathers and collectives are counted as they are."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evenload.ledger.curve import by_category, live, shares
from evenload.ledger.files import read_ledger
from evenload.ledger.words import CATEGORIES, Category, Phase, Role

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
BLOCK = 4 * (2 * 4 * 32 * 32 + 5 * 32)
"""Bytes of the parameters of one block."""


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory):
    """The ledgers of both ranks of a kind of parallelism, recorded by an unchanged script."""
    folder = tmp_path_factory.mktemp("parallel")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    recorded = {}

    def record(kind):
        if kind not in recorded:
            words = [
                "--nproc-per-node=2",
                "--standalone",
                "-m",
                "evenload",
                "track",
                "-o",
                str(folder / f"{kind}.ledger"),
            ]
            command = [sys.executable, "-m", "torch.distributed.run", *words, str(HERE / "parallel_script.py"), kind]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
            assert ran.returncode == 0, ran.stderr
            recorded[kind] = [read_ledger(folder / f"{kind}.rank{rank}.ledger") for rank in range(2)]
        return recorded[kind]

    return record


def resident(ledger):
    return by_category(ledger, live(ledger, ledger.end))


@pytest.mark.parametrize("kind", ["fsdp", "tensor", "ddp"])
def test_every_rank_writes_a_ledger_that_knows_its_rank(ledgers, kind):
    first, second = ledgers(kind)
    assert [(ledger.metadata.rank, ledger.metadata.world) for ledger in (first, second)] == [(0, 2), (1, 2)]
    assert first.complete
    assert first.allocations.nbytes.sum() == second.allocations.nbytes.sum()
    assert len(first.step_begins) == 3


def test_fsdp_shards_are_parameters_and_gathers_are_buffers_that_come_and_go(ledgers):
    ledger, _ = ledgers("fsdp")
    sums = resident(ledger)
    assert sums[Category.PARAMETER] == BLOCK  # two blocks, half of each
    assert sums[Category.OPTIMIZER] == 2 * BLOCK + 8 * 4
    assert sums[Category.GRADIENT] == sums[Category.ACTIVATION] == sums[Category.COMMUNICATION] == 0
    rows = ledger.allocations
    gathered = np.flatnonzero(rows.previous >= 0)
    assert len(gathered)  # gathered again in backward into the same storage, grown from nothing
    assert (rows.freed[rows.previous[gathered]] < rows.allocated[gathered]).all()
    assert {CATEGORIES[code] for code in rows.category[gathered]} == {Category.COMMUNICATION}
    assert {ledger.module(row) for row in gathered} == {"0", "1"}
    gradients = [row for row in range(len(rows)) if rows.category[row] == Category.GRADIENT.code]
    assert {ledger.module(row) for row in gradients} == {"0.up", "0.down", "1.up", "1.down"}


def test_memory_of_the_communication_library_is_left_alone(ledgers):
    for kind in ("fsdp", "tensor", "ddp"):
        for ledger in ledgers(kind):
            assert not (ledger.allocations.roles & Role.BEFORE.value).any(), kind


def test_tensor_parallel_counts_local_shapes_and_no_wrapper(ledgers):
    ledger, _ = ledgers("tensor")
    sums = resident(ledger)
    local = 2 * 4 * (2 * 4 * 32 * 32 // 2 + 4 * 32 // 2 + 32)
    assert sums[Category.PARAMETER] == local
    assert sums[Category.OPTIMIZER] == 2 * local + 8 * 4
    operators = {share.key[0] for share in shares(ledger, np.arange(len(ledger.allocations)), "operator")}
    assert "_c10d_functional.all_reduce" in operators
    assert not any("wrap" in operator for operator in operators if operator)
    forward = ledger.allocations.phase == Phase.FORWARD.code
    assert ledger.allocations.nbytes[forward].max() == 16 * 4 * 32 // 2 * 4  # half the width of the wide activation


def test_buckets_of_data_parallel_are_the_gradients(ledgers):
    ledger, _ = ledgers("ddp")
    sums = resident(ledger)
    assert sums[Category.PARAMETER] == 2 * BLOCK
    assert sums[Category.OPTIMIZER] == 4 * BLOCK + 8 * 4
    assert 0 < sums[Category.COMMUNICATION] <= 2 * BLOCK + 1024
