"""A training script for two processes: `fsdp`, `tensor` or `ddp` as its one argument."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_num_threads(1)
WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build(kind):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp":
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if kind == "tensor":
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    return nn.parallel.DistributedDataParallel(model)


def main():
    dist.init_process_group("gloo")
    model = build(sys.argv[1])
    adamw = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.randn(16, WIDTH)).sum().backward()
        adamw.step()
        adamw.zero_grad()
    dist.destroy_process_group()
    return model, adamw


if __name__ == "__main__":
    trained = main()
