"""Estimates beside public measurements of real runs: `python benchmarks/accuracy.py POINTS.json [--json]`.

A point is a configuration and what was measured on it. A point whose run cannot be described to evenload, or where
something else than allocated memory was measured, is skipped with the reason; nothing is fitted to any of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenload.errors import EvenloadError
from evenload.model import Model
from evenload.model.huggingface import model_from_config
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute
from evenload.profile.formula import formula_profile
from evenload.setup import Setup
from evenload.simulate.timeline import simulate

GIB = 2**30
TYPES = {"gpt": None, "moe": None}
"""Families that are no Hugging Face model with a fixed block."""
KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "padded_vocab": "vocab_size",
    "tied": "tie_word_embeddings",
}
EXPERTS = {
    "mixtral": {"experts": "num_local_experts"},
    "qwen3_moe": {"moe_ffn": "moe_intermediate_size", "experts": "num_experts", "topk": "num_experts_per_tok"},
    "deepseek_v2": {
        "moe_ffn": "moe_intermediate_size",
        "experts": "n_routed_experts",
        "topk": "num_experts_per_tok",
        "dense_layers": "first_k_dense_replace",
        "q_lora": "q_lora_rank",
        "kv_lora": "kv_lora_rank",
        "qk_nope": "qk_nope_head_dim",
        "qk_rope": "qk_rope_head_dim",
        "v_head": "v_head_dim",
    },
}
EXPERTS["deepseek_v3"] = EXPERTS["deepseek_v2"]


class SkipError(Exception):
    """The point cannot be compared; the message says why."""


@dataclass(frozen=True)
class Row:
    """One stage of one point; memory in GiB."""

    id: str
    measured: float | None
    predicted: float | None
    error_percent: float | None
    stage: int | None
    reason_if_skipped: str | None = None


def rows(point: dict[str, Any]) -> Iterator[Row]:
    """What is predicted for a point, stage by stage."""
    try:
        predicted = predicted_stages(point)
    except (SkipError, EvenloadError) as reason:
        yield Row(point["id"], None, None, None, None, str(reason).replace("\n", ";"))
        return
    try:
        measured = measured_stages(point)
    except SkipError as reason:
        fullest = max(range(len(predicted)), key=predicted.__getitem__)
        yield Row(point["id"], None, round(predicted[fullest], 3), None, fullest, str(reason))
        return
    for stage, size in measured.items():
        mine = predicted[stage]
        yield Row(point["id"], size, round(mine, 3), round(100 * (mine / size - 1), 2), stage % len(predicted))


def measured_stages(point: dict[str, Any]) -> dict[int, float]:
    """Stage -> peak allocated memory; -1 for the last stage."""
    measured = point["measured"]
    if point["kind"] == "oom":
        raise SkipError(f"ran out of memory on a device of {measured['lower_bound_gib']} GiB")
    if point["kind"] != "measured":
        raise SkipError(f"a point of the kind {point['kind']!r} has no measured peak")
    if "per_stage" in measured:
        return {entry["stage"]: entry["max_allocated_gib"] for entry in measured["per_stage"]}
    for key, unit in (("max_allocated_gib", GIB), ("max_active_gib", GIB), ("max_allocated_gb", 1e9)):
        if key in measured:
            last = "last" in point["config"].get("where", "")
            return {-1 if last else 0: measured[key] * unit / GIB}
    raise SkipError(f"reserved memory was measured, {measured.get('max_reserved_gib')} GiB; this is what is allocated")


def predicted_stages(point: dict[str, Any]) -> list[float]:
    """Peak allocated memory of every stage in GiB."""
    config = point["config"]
    model, setup = read_model(config["model"]), read_setup(config)
    layers = len(model.blocks)
    choice = {"none": Recompute.NONE, "full": Recompute.FULL}[recompute_of(config)]
    plan = Plan(
        setup=setup,
        layout=Layout.even(layers, pp=setup.pp, interleave=setup.interleave),
        policy=Policy.everywhere(choice, layers),
    )
    return [stage.peak_allocated / GIB for stage in simulate(formula_profile(model, setup), plan).memory]


def read_model(data: dict[str, Any]) -> Model:
    """The model of a point."""
    family = data["family"]
    if family in TYPES or not isinstance(data.get("ffn", 0), int):
        raise SkipError(
            f"blocks of the family {family!r} (LayerNorm, GELU or a mixture of Megatron's own) are not read"
        )
    config: dict[str, Any] = {"model_type": family}
    for mine, theirs in {**KEYS, **EXPERTS.get(family, {})}.items():
        if data.get(mine) is not None:
            config[theirs] = data[mine]
    if family.startswith("deepseek"):
        width = (
            data["shared_intermediate"] if "shared_intermediate" in data else data["shared_experts"] * data["moe_ffn"]
        )
        config["n_shared_experts"] = width // data["moe_ffn"]
        config["q_lora_rank"] = data["q_lora"] or None
    return model_from_config(config, where=data["name"], name=data["name"])


UNKNOWN = {
    "compile": "compiled kernels fuse operators",
    "float8": "float8 products are not modelled",
    "loss": "a chunked loss is not modelled",
    "optimizer_in_bwd": "an optimizer inside backward is not modelled",
    "cuda_graph": "CUDA graphs keep pools of their own",
    "note": "the number of tokens is not known",
}


def read_setup(config: dict[str, Any]) -> Setup:
    """The setup of a point.

    Raises:
        SkipError: something about the run cannot be said to evenload, or the source does not say it.
    """
    for key, reason in UNKNOWN.items():
        if config.get(key):
            raise SkipError(reason)
    flags = config.get("flags", {})
    if flags.get("fine-grained-activation-offloading"):
        raise SkipError("offloading is not modelled")
    if config.get("num_microbatches", config.get("local_batch", 1)) is None or "seq" not in config:
        raise SkipError("the source does not say the sequence length or the number of micro-batches")
    megatron = "Megatron" in config["framework"]
    titan = config["framework"] == "torchtitan"
    distributed = "distributed optimizer" in config.get("optimizer", "") or config["framework"] == "Megatron-Bridge"
    dp = (
        config.get("fsdp")
        or config.get("dp")
        or config["world"] // (config["tp"] * config["pp"] * (config.get("cp") or 1))
    )
    batches = config.get("gbs", 0) // (dp * config.get("mbs", 1))
    return Setup(
        pp=config["pp"],
        interleave=config.get("vpp") or 1,
        tp=config["tp"],
        cp=config.get("cp") or 1,
        dp=dp,
        ep=config.get("ep") or 1,
        etp=config.get("etp") if (config.get("ep") or 1) > 1 else None,
        sequence_parallel=bool(config.get("sequence_parallel")),
        zero=3 if titan else 1 if distributed else 0,
        micro_batch=config.get("mbs") or config["local_batch"],
        micro_batches=config.get("num_microbatches") or (1 if titan else max(1, batches)),
        seq=config["seq"],
        master_weights=True if megatron or titan else None,
        backend="megatron" if megatron else "torch",
        schedule="1f1b",
        hardware=hardware_of(config.get("gpu", "")),
    )


def recompute_of(config: dict[str, Any]) -> str:
    """`none` or `full`."""
    said = config.get("recompute", "none")
    if config.get("flags", {}).get("recompute-granularity"):
        said = "selective"
    for word in ("none", "full"):
        if said.startswith(word):
            return word
    raise SkipError(f"recompute {said!r} is a policy of its framework")


def hardware_of(name: str) -> str:
    """The preset for a device's name."""
    for preset in ("h200", "h100", "a100", "b200"):
        if preset in name.lower():
            return preset
    return "h100"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--source", default="", help="only points whose id begins so")
    arguments = parser.parse_args()
    points = json.loads(arguments.points.read_text())["points"]
    table = [row for point in points if point["id"].startswith(arguments.source) for row in rows(point)]
    if arguments.json:
        print(json.dumps([asdict(row) for row in table], indent=2))
        return
    for row in table:
        if row.error_percent is None:
            mine = "" if row.predicted is None else f"{row.stage:>3} {'':9} {row.predicted:9.2f} "
            print(f"{row.id:76} {mine}skipped: {row.reason_if_skipped}")
        else:
            print(f"{row.id:76} {row.stage:>3} {row.measured:9.2f} {row.predicted:9.2f} {row.error_percent:+8.2f} %")
    errors = [row.error_percent for row in table if row.error_percent is not None]
    if errors:
        mean = sum(map(abs, errors)) / len(errors)
        span = f"from {min(errors):+.2f} % to {max(errors):+.2f} %"
        print(f"{len(errors)} stages compared: mean |error| {mean:.2f} %, {span}")
        print(f"{sum(row.error_percent is None for row in table)} points skipped")


if __name__ == "__main__":
    main()
