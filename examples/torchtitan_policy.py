r"""A recompute policy for each layer of a torchtitan model, whose blocks may be compiled.

torchtitan decides per model, not per layer, what its blocks recompute, but every block passes through one method that
may be overridden. Here a policy of evenload, as the planner or a MindFormers file gives it, says what is done to each:

    from torchtitan_policy import activation_checkpointing

    policy = Policy(full=frozenset(range(4)), select={r"feed_forward\.mul": frozenset(range(4, 32))})
    wrapped = activation_checkpointing(policy, sample)      # a subclass of torchtitan's own class
    config.activation_checkpoint = wrapped.Config()         # in the function that returns the trainer's config

`sample` makes the arguments that one block is called with, for example
`lambda: ((torch.empty(1, 8192, 4096, dtype=torch.bfloat16, device="cuda"), None), {})`; only their shapes, types and
device matter, nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from evenload.plan.policy import Policy, Recompute
from evenload.recompute import selective_checkpoint

Sample = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
"""Arguments of one block."""


def wrap_block(
    block: torch.nn.Module, name: str, policy: Policy, sample: Sample, *, preserve_rng_state: bool = True
) -> torch.nn.Module:
    """What stands in the place of a block: itself, or a checkpoint that does what the policy says.

    Args:
        block: a transformer block, not yet compiled.
        name: `layers.7`, where 7 is the layer that the policy counts.
        policy: what is recomputed on every layer.
        sample: makes the block's arguments.
        preserve_rng_state: what runs again draws the same random numbers.
    """
    own = policy.for_layer(int(name.rpartition(".")[2]))
    if own.choice is Recompute.NONE:
        return block
    if own.choice is Recompute.FULL and not own.select_exclude and policy.mp_comm:
        return checkpoint_wrapper(block, preserve_rng_state=preserve_rng_state)
    args, kwargs = sample()
    chosen = selective_checkpoint(block, own, *args, **kwargs)
    for note in chosen.not_expressed:
        print(f"{name}: {note}")
    print(f"{name}: keeps {chosen.kept_bytes} bytes instead of {chosen.before}")
    return checkpoint_wrapper(block, context_fn=chosen.context_fn, preserve_rng_state=preserve_rng_state)


def activation_checkpointing(policy: Policy, sample: Sample) -> type:
    """A class that torchtitan takes as `activation_checkpoint` in its configuration."""
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing  # noqa: PLC0415  # only here

    class PolicyCheckpointing(ActivationCheckpointing):
        def _wrap_block(self, module: torch.nn.Module, *, base_fqn: str | None = None) -> torch.nn.Module:
            preserve = self.config.preserve_rng_state
            return wrap_block(module, base_fqn or "layers.0", policy, sample, preserve_rng_state=preserve)

    return PolicyCheckpointing
