"""Estimates beside dry runs of the same plan: the peak of a rank, from formulas and from the operators that run."""

from __future__ import annotations

import pytest
import torch

from evenload.ledger.curve import peaks
from evenload.model.huggingface import model_from_config
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.profile.buffers import WORKSPACE
from evenload.profile.formula import formula_profile
from evenload.record.planned import prepare_plan
from evenload.runtime.dryrun import prepare_rank
from evenload.setup import Setup
from evenload.simulate.timeline import simulate

torch.set_num_threads(1)
MIB = 2**20
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}


def both(stage=0, autocast=None, **options):
    """(estimated, dry-run) peak of the first rank of a stage in MiB, without the workspace that no dry run sees."""
    setup = Setup(**{"seq": 256, "dtype": "fp32", **options})
    model = model_from_config(CONFIG)
    plan = Plan(setup=setup, layout=Layout.even(4, pp=setup.pp, interleave=setup.interleave), policy=Policy())
    memory = simulate(formula_profile(model, setup, autocast=autocast), plan).memory[stage]
    kind = torch.bfloat16 if autocast else None
    if setup.devices == 1:
        ledger = prepare_plan(CONFIG, plan, autocast=kind)()
    else:
        ledger = prepare_rank(CONFIG, plan, rank=stage * setup.dp * setup.tp, autocast=kind)().ledger
    return (memory.peak_allocated - WORKSPACE["h100"]) / MIB, peaks(ledger).held / MIB


SCALARS = 0.05
"""MiB of a batch, the loss and other single numbers."""
TABLES = 0.13
"""MiB of position tables, which an estimate counts all the time; an optimizer step does not find them."""


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients_are_there_from_the_backward_that_makes_them(dp, micro_batches, dtype):
    estimated, run = both(dp=dp, micro_batches=micro_batches, dtype=dtype)
    assert run - SCALARS <= estimated <= run + TABLES


def test_the_optimizer_step_is_the_peak_where_activations_are_small():
    estimated, run = both(autocast="bf16", seq=32)
    assert estimated == pytest.approx(run, rel=1e-3)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast_under_tensor_parallelism(sequence_parallel):
    estimated, run = both(tp=2, sequence_parallel=sequence_parallel, autocast="bf16")
    assert estimated == pytest.approx(run, rel=0.015)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_the_last_stage_holds_its_logits_until_their_backward(micro_batches):
    """Under GPipe those of every micro-batch; one tensor of hidden states each is what remains."""
    estimated, run = both(stage=1, pp=2, micro_batches=micro_batches, schedule="gpipe", dtype="bf16")
    logits, hidden = 256 * 1024 * 2 / MIB, 256 * 256 * 2 / MIB
    assert abs(run - estimated) <= micro_batches * hidden + SCALARS < micro_batches * logits


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("stage", [0, 1])
def test_fsdp_in_a_pipeline(zero, stage):
    estimated, run = both(stage=stage, pp=2, dp=2, zero=zero, micro_batches=4, dtype="bf16")
    assert estimated == pytest.approx(run, rel=0.015)
