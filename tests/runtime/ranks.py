"""What several processes do together; each case returns plain values that the tests look at."""

from __future__ import annotations

from tests.processes import run_all
from tests.runtime import cases


def main(rank: int, world: int, folder: str) -> None:
    run_all(rank, world, folder, cases.CASES[world])
