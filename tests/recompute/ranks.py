"""What two processes do together; run by `test_distributed.py`, which looks at the results."""

from __future__ import annotations

from tests.processes import run_all
from tests.recompute import ranks_data, ranks_pipeline, ranks_tensor
from tests.recompute.rank_training import RANKS

SCENARIOS = {run.__name__: run for part in (ranks_data, ranks_pipeline, ranks_tensor) for run in part.SCENARIOS}


def main(rank: int, folder: str) -> None:
    run_all(rank, RANKS, folder, SCENARIOS)
