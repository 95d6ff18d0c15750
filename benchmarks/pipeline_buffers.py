"""Pipeline buffers as `evenload.profile.buffers` counts them, beside real pipelines of torch.distributed on CPU.

`python benchmarks/pipeline_buffers.py` runs small pipelines in processes of their own (Gloo, one thread each) and
prints, for every rank, the peak of one step above what is alive between steps. All tensors have the size of one
boundary, so everything is counted in boundary tensors:

* a chunk is three layers `sigmoid(x W)`, each of which keeps its result: two of them are kept for each micro-batch in
  flight, the third is the chunk's output and belongs to the buffers;
* the backward of a layer works with two gradients and half a tensor, the gradient of a weight;
* the loss keeps the last chunk's output and the error for each micro-batch in flight, and works with 1.5 more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

WIDTH, ROWS = 256, 512
BOUNDARY = WIDTH * ROWS * 4
CASES = (("gpipe", 2, 1, 4), ("1f1b", 2, 1, 8), ("1f1b", 4, 1, 8), ("interleaved_1f1b", 2, 2, 4))
CASES += (("interleaved_1f1b", 2, 2, 8),)


def measured(name: str, pp: int, interleave: int, micro_batches: int) -> list[float]:
    """Peak of a step on every rank, in boundary tensors above what is alive between steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={pp}"]
    words = [__file__, name, str(interleave), str(micro_batches)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=600)
    found = dict(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("peak "))
    if len(found) != pp:
        raise SystemExit(done.stderr)
    return [float(found[str(rank)]) for rank in range(pp)]


def predicted(name: str, pp: int, interleave: int, micro_batches: int) -> list[float]:
    """The same from the house's rules; receive buffers are alive between steps and left out."""
    from evenload.profile.buffers import fullest_moments, pipeline_buffers
    from evenload.setup import Setup

    setup = Setup(pp=pp, interleave=interleave, micro_batches=micro_batches, schedule=name)
    peaks = []
    for rank, moment in enumerate(fullest_moments(name, pp, interleave, micro_batches)):
        places = [chunk * pp + rank for chunk in range(interleave)]
        inputs = sum(count for place, count in zip(places, moment.held, strict=True) if place > 0)
        receiving = micro_batches * sum((place > 0) + (place < pp * interleave - 1) for place in places)
        loss = 2 * moment.held[-1] + 1.5 if rank == pp - 1 else 0.0
        peaks.append(pipeline_buffers(setup, 1, rank) - receiving + inputs + 2 * sum(moment.held) + 2.5 + loss)
    return peaks


def work(name: str, interleave: int, micro_batches: int) -> None:
    """One rank of a real pipeline."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, pp = dist.get_rank(), dist.get_world_size()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = torch.nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.product(x))

    def stage(place: int) -> Any:
        like = torch.zeros(ROWS, WIDTH, requires_grad=True)
        chunk = torch.nn.Sequential(*(Layer() for _ in range(3)))
        args = {"input_args": (like.detach() if place == 0 else like,), "output_args": (like,)}
        return PipelineStage(chunk, place, pp * interleave, torch.device("cpu"), **args)

    stages = [stage(chunk * pp + rank) for chunk in range(interleave)]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).mean()

    kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved_1f1b": ScheduleInterleaved1F1B}
    schedule: Any = kinds[name](stages if name.startswith("inter") else stages[0], micro_batches, loss_fn=loss)
    inputs = (torch.randn(ROWS * micro_batches, WIDTH),) if rank == 0 else ()
    target = {"target": torch.randn(ROWS * micro_batches, WIDTH)} if rank == pp - 1 else {}

    def step() -> None:
        schedule.step(*inputs, **target, return_outputs=False)

    step()  # the first step makes the receive buffers, the gradients
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    found = recorded.profiler.kineto_results.events()
    level = peak = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]"):
        level += change
        peak = max(peak, level)
    print(f"peak {rank} {peak / BOUNDARY}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Print the table; exit code 1 if a prediction is off."""
    if "RANK" in os.environ:
        work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
        return
    wrong = 0
    print(f"{'schedule':20} pp chunks micro-batches rank  measured predicted")
    for case in CASES:
        for rank, (real, mine) in enumerate(zip(measured(*case), predicted(*case), strict=True)):
            wrong += abs(real - mine) > 0.05
            print(f"{case[0]:20} {case[1]:2} {case[2]:6} {case[3]:13} {rank:4} {real:9.2f} {mine:9.2f}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
