"""Questions and complaints about memory estimates from public trackers, as small cases with the right answer."""

from __future__ import annotations

import json

import pytest

from evenload.cli.main import main
from evenload.model.huggingface import model_from_config
from evenload.model.presets import preset
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import LayerPolicy, Policy, Recompute
from evenload.profile.formula import formula_profile
from evenload.profile.given import read_layer_table
from evenload.setup import Setup
from evenload.simulate.timeline import simulate
from evenload.units import gib, parse_bytes

GIB = 2**30


def llama(**sizes):
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        **sizes,
    }
    return model_from_config(config)


def memory(profile, setup, *, layout=None, policy=None):
    layout = layout or Layout.even(len(profile.blocks), pp=setup.pp, interleave=setup.interleave)
    return simulate(profile, Plan(setup=setup, layout=layout, policy=policy or Policy())).memory


def values(profile, kind):
    """Bytes of the values that the operators of a layer make, by name."""
    return {value.name: value.nbytes for value in profile.kind(kind).graph.values}


def test_stages_of_a_mixed_model_follow_its_own_layers_not_their_average():
    """NVIDIA-NeMo/Megatron-Bridge#5077: averaging dense and MoE layers said 4744 where the heaviest stage has 5856."""
    layer = {"time": 1, "mem_act": 1e-9}
    table = {
        "body": [
            {"name": "dense", "count": 2, "mem_par": 352, **layer},
            {"name": "moe", "count": 6, "mem_par": 1464, **layer},
        ]
    }
    profile = read_layer_table(table).profile
    static = [rank.static for rank in memory(profile, Setup(pp=2), layout=Layout(((4, 4),)))]
    assert sum(static) / 2 == 4744
    assert max(static) == 5856
    assert memory(profile, Setup(pp=2), layout=Layout(((3, 5),)))[1].static == 5 * 1464


def test_selective_recompute_leaves_stages_uneven_because_of_what_is_in_flight():
    """NVIDIA/Megatron-LM#307: 13B, tp 2, pp 2: 50 % and 70 % full; with full recompute both stages are alike."""
    setup = Setup(tp=2, pp=2, micro_batch=4, micro_batches=7, seq=2048, backend="megatron")
    profile = formula_profile(preset("llama-2-13b"), setup)
    select, full = (
        memory(profile, setup, policy=Policy.everywhere(choice, 40)) for choice in (Recompute.SELECT, Recompute.FULL)
    )
    assert [rank.in_flight for rank in select] == [(2,), (1,)]
    assert select[0].needed > 1.15 * select[1].needed
    assert abs(full[0].needed - full[1].needed) < 0.1 * full[1].needed


def test_two_stages_need_not_sum_to_one_device():
    """deepspeedai/DeepSpeed#3676: the first stage has the large early feature maps, and two micro-batches of them."""
    table = {
        "body": [
            {"name": "early", "count": 2, "time": 1, "mem_par": 100, "mem_act": 400},
            {"name": "late", "count": 2, "time": 1, "mem_par": 500, "mem_act": 50},
        ]
    }
    profile = read_layer_table(table).profile
    one = memory(profile, Setup())[0]
    two = memory(profile, Setup(pp=2, micro_batches=4))
    assert one.peak_allocated == 2100
    assert [rank.peak_allocated for rank in two] == [200 + 2 * 800, 1000 + 100]
    assert sum(rank.peak_allocated for rank in two) > one.peak_allocated
    assert two[0].static < two[1].static  # balanced by parameters is not balanced by bytes


def test_seven_billion_parameters_in_fp32_take_112_gb(capsys):
    """tatsu-lab/stanford_alpaca#322: why 7 * 4 * 4 GB?"""
    assert main(["estimate", "llama-2-7b", "--dtype", "fp32", "--json"]) == 0
    stage = json.loads(capsys.readouterr().out)["stages"][0]
    count = preset("llama-2-7b").parameters
    assert (stage["parameters"], stage["gradients"], stage["optimizer"]) == (4 * count, 4 * count, 8 * count)
    assert stage["static"] == 16 * count
    assert 16 * 7e9 == 112e9
    assert main(["estimate", "llama-2-7b", "--dtype", "bf16", "--master-weights", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["static"] == 16 * count
    assert main(["estimate", "llama-2-7b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["static"] == 8 * count


def test_logits_in_bf16_are_half_of_those_in_fp32():
    """huggingface/trl#3678: [2, 256, 151665] was reported as 310 MB in bf16; that is its fp32 size."""
    model = llama(vocab_size=151665, num_hidden_layers=1)
    sizes = values(formula_profile(model, Setup(micro_batch=2, seq=256)), "head").values()
    assert 2 * 256 * 151665 * 2 in sizes  # 155.3 MB
    assert 2 * 256 * 151665 * 4 in sizes  # 310.6 MB, made by the loss
    assert round(2 * 256 * 151665 * 2 / 1e6, 1) == 155.3


def test_hidden_states_of_36_layers_are_36_gib_not_gb():
    """huggingface/transformers#48444: 131072 tokens, 36 layers, width 4096, bf16."""
    model = preset("qwen3-8b")
    profile = formula_profile(model, Setup(seq=131072))
    kept = sum(profile.kind(kind).cost(LayerPolicy(full=True)).kept for kind in profile.blocks)
    assert kept == 36 * GIB
    assert gib(kept) == "36.00 GiB"
    assert round(kept / 1e9, 2) == 38.65
    small = formula_profile(llama(hidden_size=8192, num_hidden_layers=8, num_attention_heads=64), Setup(seq=1024))
    assert 8 * small.kind("dense").cost(LayerPolicy(full=True)).kept == 128 * 2**20


def test_what_full_recompute_keeps_is_what_offloading_would_move():
    """axolotl-ai-cloud/axolotl#3776: Qwen3-8B, 8192 tokens: the host grew by 2.42 GB = layers * tokens * width * 2."""
    profile = formula_profile(preset("qwen3-8b"), Setup(seq=8192))
    kept = sum(profile.kind(kind).cost(LayerPolicy(full=True)).kept for kind in profile.blocks)
    assert kept == 36 * 8192 * 4096 * 2
    assert kept / 1e9 == pytest.approx(2.42, abs=0.01)


def test_both_kinds_of_units_are_read_and_one_is_written(capsys):
    """meta-pytorch/torchtune#1346: bytes / 2**30 labelled GB."""
    assert parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes("80GiB") == 80 * GIB
    assert main(["estimate", "llama-3-8b", "--memory", "120GB"]) == 0
    out = capsys.readouterr().out
    assert "111.76 GiB" in out
    assert "GB" not in out.replace("GiB", "")


def test_logits_are_divided_by_tensor_and_context_ranks():
    """verl-project/verl#7686: 16384 tokens, 152064 entries, tp 4, cp 2: 622.9 MB for each dense tensor in bf16."""
    model = llama(vocab_size=152064, num_hidden_layers=1)
    sizes = values(formula_profile(model, Setup(seq=16384, tp=4, cp=2, dp=1)), "head").values()
    assert 622_854_144 in sizes
    assert 2 * 622_854_144 in sizes  # converted to fp32 by the loss


def test_an_estimate_says_which_measure_it_is_to_be_compared_with(capsys, tmp_path):
    """aliyun/aicb#36: a tool said 24.4 GB where nvidia-smi, which shows context and communicators too, said 21 GB."""
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 10880,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 50257,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--backend", "megatron", "--tp", "8", "--dp", "4", "--micro-batches", "8", "--sequence-parallel"]
    assert main(["estimate", str(tmp_path), *words, "--json"]) == 0
    stage = json.loads(capsys.readouterr().out)["stages"][0]
    assert abs(stage["needed"] - 21e9) < 0.15 * 21e9
    assert stage["outside"] > 10**9  # the part of it that torch.cuda.max_memory_allocated() never sees
    assert main(["estimate", str(tmp_path), *words]) == 0
    assert "needed = peak inside the allocator + outside it" in capsys.readouterr().out
