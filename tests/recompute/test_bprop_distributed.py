"""The documented reduce-scatter as a custom operator, on two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import evenload

SRC = Path(evenload.__file__).parents[1]


@pytest.mark.slow
def test_the_reduce_scatter_of_the_checklist_keeps_nothing_instead_of_its_input():
    script = Path(__file__).with_name("reduce_scatter.py")
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(program, capture_output=True, text=True, check=True, env=environment, timeout=120)
    answers = json.loads(ran.stdout.strip().splitlines()[-1])
    assert len(answers) == 6
    for name, answer in answers.items():
        assert answer["output"], name
        assert answer["gradient"], name
    for swap in (False, True):
        assert answers[f"None {swap}"]["saved"] == 8 * 2**20 + 4 * 2**20  # the input, and its own part of the output
        assert answers[f"[] {swap}"]["saved"] == 0
        assert answers[f"[2] {swap}"]["saved"] == 0
