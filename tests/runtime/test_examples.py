"""The examples run under torchrun, as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.running import LIMIT, SOURCE

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def torchrun(*words: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


@pytest.mark.parametrize("name", ["loop", "hugging_face"])
def test_an_example_learns(name):
    out = torchrun(f"examples/train/{name}.py")
    found = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step ")]
    assert len(found) == 4
    assert found[-1] < 0.6 * found[0]


def test_the_plan_of_make_train_trains():
    folder = "examples/train"
    out = torchrun("-m", "evenload", "train", f"{folder}/plan.yaml", f"--settings={folder}/settings.yaml", "--steps=3")
    assert "step 3  loss 5." in out
