"""Measure, plan, train: the planned layers beside even ones, on two gloo ranks with one thread each.

    python benchmarks/planner_loop.py --repeats 3

The model is `examples/heavy_head`: small layers and a large vocabulary. Everything is done by the command line:
`evenload profile` on two processes, `evenload plan` with its file, and `evenload train` of the plan and of even layers
in turn, so that both meet the same machine. The ratio is the median of those of single pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from evenload.cli.main import main as evenload
from evenload.dialects.detect import read_settings
from evenload.dialects.native import write_native
from evenload.plan.layout import Layout
from evenload.plan.policy import Policy
from evenload.units import MIB

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "heavy_head"
RANKS = 2
SIZES = ("--seq", "128", "--micro-batch", "2", "--dtype", "fp32")


def torchrun(*words: str) -> None:
    """Run a verb on all ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "-m", "evenload", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def planned(folder: Path, memory: str, micro_batches: int, rounds: int) -> dict[str, Path]:
    """The plan, and the same with even layers and nothing recomputed."""
    profile, plan, even = folder / "measured.json", folder / "plan.yaml", folder / "even.yaml"
    measuring = ("--implementation", "reference", "--rounds", str(rounds))
    torchrun("profile", str(MODEL), *SIZES, *measuring, "--out", str(profile))
    words = ["plan", "--profile", str(profile), "--pp", str(RANKS), "--micro-batches", str(micro_batches)]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = evenload([*words, "--memory", memory, "--out", str(plan)])
    if code:
        raise SystemExit(text.getvalue())
    print(text.getvalue(), file=sys.stderr)
    own = read_settings(plan).plan
    layout = Layout.even(own.layout.num_layers, pp=RANKS)
    even.write_text(write_native(replace(own, layout=layout, policy=Policy())).text, encoding="utf-8")
    return {"even": even, "planned": plan}


def trained(plan: Path, steps: int) -> dict[str, Any]:
    """What a run says of its time and of its memory."""
    found, settings = plan.with_suffix(".json"), MODEL / "settings.yaml"
    torchrun("train", str(plan), "--settings", str(settings), "--steps", str(steps), "--memory-file", str(found))
    return json.loads(found.read_text("utf-8"))


def line(name: str, plan: Path, peaks: list[float], runs: list[dict[str, Any]]) -> str:
    """A line of the table."""
    layers = " + ".join(str(count) for count in read_settings(plan).plan.layout.table[0])
    predicted = median(run["step_time"]["predicted"] for run in runs) * 1e3
    measured = median(run["step_time"]["measured"] for run in runs) * 1e3
    held = ", ".join(f"{rank['measured'] / MIB:.1f}" for rank in runs[0]["ranks"])
    expected = ", ".join(f"{peak / MIB:.1f}" for peak in peaks)
    return f"| {name} | {layers} | {predicted:.0f} | {measured:.0f} | {expected} | {held} |"


def estimated(plan: Path, profile: Path) -> list[float]:
    """Peak of every rank, by the measured profile."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        evenload(["simulate", str(plan), "--profile", str(profile), "--json"])
    return json.loads(text.getvalue())["peak"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="160MiB")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plans = planned(Path(folder), asked.memory, asked.micro_batches, asked.rounds)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
        for repeat in range(asked.repeats):
            for name in sorted(plans, reverse=repeat % 2 == 1):
                runs[name].append(trained(plans[name], asked.steps))
        print("| layers | by rank | predicted step (ms) | measured | predicted peak (MiB, by rank) | measured |")
        print("|---|---|---|---|---|---|")
        for name, plan in plans.items():
            print(line(name, plan, estimated(plan, Path(folder) / "measured.json"), runs[name]))
        for what in ("predicted", "measured"):
            pairs = zip(runs["even"], runs["planned"], strict=True)
            ratios = sorted(one["step_time"][what] / other["step_time"][what] for one, other in pairs)
            single = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"\neven / planned, {what}: {median(ratios):.2f} (pairs: {single})")
        print(f"\nLimit: {asked.memory} a rank.")


if __name__ == "__main__":
    main()
