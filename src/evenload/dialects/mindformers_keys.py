"""The keys of MindFormers' settings: which there are, and what an unknown one may have meant.

A key that is one slip away from a known one is an error, because MindFormers refuses it or, worse, goes on without it.
Any other unknown key is a warning: versions differ in what they know. Source: MindFormers r1.3 to master,
`mindformers/modules/transformer/transformer.py` and the configuration documentation; PyNative: r2.0 documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from evenload.dialects.typed import at, mapping, shown
from evenload.dialects.yaml_source import YamlSource
from evenload.errors import Notice

SECTIONS: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    ("parallel_config",): (
        "data_parallel",
        "model_parallel",
        "context_parallel",
        "expert_parallel",
        "pipeline_stage",
        "micro_batch_num",
        "seq_split_num",
        "use_seq_parallel",
        "optimizer_shard",
        "gradient_aggregation_group",
        "vocab_emb_dp",
        "context_parallel_algo",
        "ulysses_degree_in_cp",
        "mem_coeff",
        "micro_batch_interleave_num",
        "expert_model_parallel",
        "npu_nums_per_device",
        "reset_attention_mask",
        "recompute",
        "select_recompute",
    ),
    ("recompute_config",): (
        "recompute",
        "select_recompute",
        "select_comm_recompute",
        "select_recompute_exclude",
        "select_comm_recompute_exclude",
        "parallel_optimizer_comm_recompute",
        "mp_comm_recompute",
        "recompute_slice_activation",
    ),
    ("swap_config",): ("swap", "default_prefetch", "layer_swap", "op_swap"),
    ("parallel", "pipeline_config"): ("pipeline_interleave", "pipeline_scheduler"),
}
"""Sections whose keys are all known."""

READ_HERE: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    ("model", "model_config"): ("num_layers", "num_hidden_layers", "offset", "pp_interleave_num"),
    ("model_config",): ("num_layers", "num_hidden_layers", "offset", "pp_interleave_num"),
    ("parallel",): ("pipeline_config", "enable_parallel_optimizer", "parallel_optimizer_config"),
}
"""Sections that hold more than evenload reads: only slips in these keys are looked for."""

PYNATIVE_SECTIONS: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    ("parallelism",): (
        "data_parallel",
        "data_parallel_shard",
        "data_parallel_shard_strategy",
        "reshard_after_forward_policy",
        "cpu_offload",
        "disable_gradient_division",
        "tensor_parallel",
        "sequence_parallel",
        "context_parallel",
        "context_parallel_method",
        "context_parallel_async",
        "ulysses_degree_in_cp",
        "context_parallel_mask_type",
        "pipeline_parallel",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_schedule",
        "pipeline_parallel_interleave_num",
        "pipeline_parallel_microbatch_size",
        "pipeline_parallel_overlap_p2p",
        "pipeline_parallel_overlap_b_f",
        "pipeline_parallel_enable_dxdw_split",
        "expert_parallel",
        "expert_tensor_parallel",
        "npu_nums_per_device",
        "moe_token_dispatcher_type",
        "hsdp_shard_size",
        "hsdp_optimizer_level",
        "hsdp_threshold",
        "dense_fsdp_shard_size",
        "enable_loss_parallel",
        "enable_mc2",
        "pipeline_parallel_p2p_transport",
    ),
    ("recompute",): ("mode", "full_recompute_layer", "select_module", "exclude_op"),
    ("recompute_comm",): ("enable", "select_module", "exclude_op"),
    ("swap",): ("enable", "default_prefetch", "layer_swap", "op_swap"),
}

_NEAR: Final = 0.8
_NEAR_IN_OPEN_SECTION: Final = 0.87


def check_keys(
    source: YamlSource,
    sections: Mapping[tuple[str, ...], tuple[str, ...]],
    open_sections: Mapping[tuple[str, ...], tuple[str, ...]] | None = None,
) -> list[Notice]:
    """Warnings for unknown keys of the sections.

    Raises:
        EvenloadError: a section that is no mapping, or a key that is a slip of a known one; with its place.
    """
    notices: list[Notice] = []
    for path, known in sections.items():
        for key in _section(source, path):
            if key not in known:
                _refuse_slip(source, (*path, key), known, _NEAR)
                notices.append(
                    Notice(
                        fact=f"the key {key!r} of {'.'.join(path)} is not known here; it changes nothing",
                        where=source.where(*path, key, key=True),
                    )
                )
    for path, known in (open_sections or {}).items():
        for key in _section(source, path):
            if key not in known:
                missing = [name for name in known if name not in _section(source, path)]
                _refuse_slip(source, (*path, key), missing, _NEAR_IN_OPEN_SECTION)
    return notices


def _section(source: YamlSource, path: tuple[str, ...]) -> Mapping[str, object]:
    value = at(source, path)
    if value is None:
        return {}
    found = mapping(value)
    if found is None:
        raise source.error(f"{'.'.join(path)} is {shown(value)}, not a mapping of keys to values", *path)
    return found


def _refuse_slip(source: YamlSource, path: tuple[str, ...], known: tuple[str, ...] | list[str], cutoff: float) -> None:
    from difflib import get_close_matches  # noqa: PLC0415  # only for keys that are not known

    near = get_close_matches(path[-1], known, n=1, cutoff=cutoff)
    if near:
        raise source.error(
            f"the key {path[-1]!r} of {'.'.join(path[:-1])} is not known",
            *path,
            key=True,
            fix=f"did you mean {near[0]!r}?",
        )
