"""A model of transformers under a plan.

Run it so: torchrun --nproc-per-node 2 examples/train/hugging_face.py
"""

from __future__ import annotations

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

import evenload
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.setup import Setup

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=None,
)


def main() -> None:
    """Train for a few steps, with whole layers recomputed under a zero-bubble schedule."""
    distributed.init_process_group("gloo")
    plan = Plan(
        setup=Setup(pp=2, interleave=2, micro_batch=2, micro_batches=4, seq=32, dtype="fp32", schedule="zbv"),
        layout=Layout(((2, 2), (2, 1))),
        policy=Policy(full=range(4), select={r"mlp\.mul": range(4, 7)}),
    )
    pipeline, _ = evenload.parallelize(lambda: LlamaForCausalLM(CONFIG), plan)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3, fused=True)
    row = torch.arange(33).repeat(8, 1) + torch.arange(8)[:, None]
    for step in range(20):
        optimizer.zero_grad()
        loss = pipeline.step(row[:, :-1], target=row[:, 1:])
        optimizer.step()
        if loss is not None and step % 5 == 4:
            print(f"step {step + 1}: loss {loss:.3f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
