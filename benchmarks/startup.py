"""How long the command line takes to answer, as whole processes: start, answer, exit.

    python benchmarks/startup.py [--repeats 5]

Prints the least and the median wall time and the least processor time of every verb on a shipped example.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
QUESTIONS = {
    "--version": ["--version"],
    "check": ["check", str(EXAMPLES / "mindformers" / "pretrain_llama2_70b.yaml")],
    "estimate": ["estimate", str(EXAMPLES / "models" / "llama-3.1-405b"), "--pp", "16", "--tp", "8"],
    "simulate": ["simulate", "llama-3-8b", "--pp", "4", "--micro-batches", "16"],
}


def ask(arguments: list[str]) -> tuple[float, float]:
    """(wall, processor) seconds of one process."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "evenload", *arguments], capture_output=True, check=True)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"{'question':12} {'wall min':>9} {'median':>9} {'cpu min':>9}  seconds, {repeats} runs")
    for name, arguments in QUESTIONS.items():
        wall, cpu = zip(*(ask(arguments) for _ in range(repeats)), strict=True)
        print(f"{name:12} {min(wall):9.2f} {statistics.median(wall):9.2f} {min(cpu):9.2f}")


if __name__ == "__main__":
    main()
