"""A plan becomes torchtitan settings, and what they cannot say is named."""

import tomllib

import pytest
from hypothesis import given

from evenload.dialects.torchtitan import model_parts, write_torchtitan
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute
from evenload.setup import Setup

from .plans import plans


def plan_of(table, policy=None, **setup):
    layout = Layout(table)
    return Plan(
        setup=Setup(pp=layout.pp, interleave=layout.interleave, **setup), layout=layout, policy=policy or Policy()
    )


def test_uneven_interleaved_layers_are_listed_chunk_by_chunk():
    plan = plan_of(((1, 2), (2, 1)), schedule="interleaved_1f1b", micro_batch=2, micro_batches=8, dp=4, seq=8192)
    settings = tomllib.loads(write_torchtitan(plan).text)
    assert settings["parallelism"]["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "layers.4"],
        ["layers.5", "norm", "output"],
    ]
    assert settings["parallelism"]["pipeline_parallel_degree"] == 2
    assert settings["parallelism"]["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert settings["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert settings["training"] == {
        "seq_len": 8192,
        "local_batch_size": 16,
        "global_batch_size": 64,
        "dtype": "bfloat16",
    }
    assert settings["activation_checkpoint"] == {"mode": "none"}


@given(plans())
def test_every_layer_is_in_exactly_one_part_and_the_text_is_toml(plan):
    settings = tomllib.loads(write_torchtitan(plan).text)
    parts = model_parts(plan.layout)
    if plan.layout.pp * plan.layout.interleave > 1:
        assert settings["parallelism"]["module_fqns_per_model_part"] == parts
    else:
        assert "module_fqns_per_model_part" not in settings["parallelism"]
    flat = [name for part in parts for name in part]
    assert flat == ["tok_embeddings", *(f"layers.{layer}" for layer in range(plan.layout.num_layers)), "norm", "output"]
    for part, (_, _, layers) in zip(parts, plan.layout.chunks(), strict=True):
        assert [name for name in part if name.startswith("layers.")] == [f"layers.{layer}" for layer in layers]
    degrees = settings["parallelism"]
    assert degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"] == plan.setup.dp


def test_the_python_style_says_the_same():
    plan = plan_of(((2, 1),), zero=3, dp=2, tp=2)
    text = write_torchtitan(plan, style="python").text

    def keep(**fields):
        return fields

    names = dict.fromkeys(("ParallelismConfig", "TrainingConfig", "ActivationCheckpointConfig"), keep)
    assert eval(f"dict({text.split(chr(10), 1)[1]})", names) == tomllib.loads(write_torchtitan(plan).text)


@pytest.mark.parametrize(
    ("policy", "mode", "fact"),
    [
        (Policy(), "none", None),
        (Policy.everywhere(Recompute.FULL, 4), "full", None),
        (Policy(full=frozenset({0, 1})), "full", "layers 0-1 are planned, all 4 are recomputed"),
        (Policy.everywhere(Recompute.SELECT, 4), "selective", r"'feed_forward\.mul'"),
        (Policy(comm={r".*\.norm": frozenset({0})}), "none", "recomputed communication is left out"),
        (Policy(optimizer_comm=True), "none", "optimizer_comm is left out"),
        (Policy(slice_activation=True), "none", "slice_activation is left out"),
        (Policy(full=frozenset(range(4)), mp_comm=False), "full", "the plan keeps their results"),
    ],
)
def test_recomputation_becomes_one_mode_and_the_rest_is_named(policy, mode, fact):
    writing = write_torchtitan(plan_of(((2, 2),), policy, tp=2))
    assert tomllib.loads(writing.text)["activation_checkpoint"]["mode"] == mode
    facts = [loss.fact for loss in writing.losses]
    assert (not facts) if fact is None else any(fact in said for said in facts)


@pytest.mark.parametrize(
    ("setup", "fact"),
    [
        ({"zero": 1, "dp": 2}, "ZeRO stage 1"),
        ({"zero": 2, "dp": 2}, "ZeRO stage 2"),
        ({"schedule": "interleaved_1f1b_less_memory"}, "becomes torchtitan's 1F1B"),
        ({"dtype": "fp16"}, "not in fp16"),
    ],
)
def test_settings_that_torchtitan_lacks_are_named(setup, fact):
    assert any(fact in loss.fact for loss in write_torchtitan(plan_of(((2, 2),), **setup)).losses)


def test_an_empty_chunk_is_named():
    assert any("without layers" in loss.fact for loss in write_torchtitan(plan_of(((2, 0),))).losses)
