"""The reduce-scatter of sequence parallelism as a custom operator, on two processes: run by test_bprop_distributed.py.

Prints, from rank 0, whether outputs and gradients equal those of one process, and the bytes that autograd saved.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

from evenload.recompute import CustomOperator


class ReduceScatterToSequenceParallelRegion(CustomOperator):
    """Sums over the group and keeps this rank's part of the sequence; its backward gathers, and needs only dout."""

    def __init__(self, *, need_to_swapaxes, used):
        super().__init__()
        self.world_size = dist.get_world_size()
        self.need_to_swapaxes = need_to_swapaxes
        if used is not None:
            self.used_bprop_inputs = used

    def forward(self, x):
        if self.need_to_swapaxes:
            x = x.swapaxes(0, 1)
        output = x.new_empty(x.shape[0] // self.world_size, *x.shape[1:])
        dist.reduce_scatter_tensor(output, x.contiguous())
        return output.swapaxes(0, 1) if self.need_to_swapaxes else output

    def bprop(self, *args):
        dout = args[-1]
        if self.need_to_swapaxes:
            dout = dout.swapaxes(0, 1)
        output = dout.new_empty(dout.shape[0] * self.world_size, *dout.shape[1:])
        dist.all_gather_into_tensor(output, dout.contiguous())
        return (output.swapaxes(0, 1) if self.need_to_swapaxes else output,)


def measure(used, swap):
    """One call on this rank: what it gives, and the bytes that autograd saved for it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    shape = (1024, 2, 1024)  # sequence, batch, hidden: 8 MiB
    shape = (2, 1024, 1024) if swap else shape
    parts = [torch.randn(shape, generator=generator) for _ in range(world)]
    weights = torch.randn(shape, generator=generator)
    mine = slice(rank * 1024 // world, (rank + 1) * 1024 // world)
    x = parts[rank].requires_grad_()
    saved = []
    operator = ReduceScatterToSequenceParallelRegion(need_to_swapaxes=swap, used=used)
    given = x * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.nbytes) or one.detach(), torch.detach):
        y = operator(given)
    weight = weights[:, mine] if swap else weights[mine]
    (y * weight).sum().backward()
    total = sum(part.detach() for part in parts)
    expected = total[:, mine] if swap else total[mine]
    return {
        "output": torch.allclose(y, expected, atol=1e-5),
        "gradient": torch.equal(x.grad, weights),
        "saved": sum(saved),
    }


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers = {f"{used} {swap}": measure(used, swap) for used in (None, [], [2]) for swap in (False, True)}
    if dist.get_rank() == 0:
        print(json.dumps(answers))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
