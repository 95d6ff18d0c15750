"""Which settings the caching allocators know, what values they take, and which of them do not go together.

Sources: `c10/core/AllocatorConfig.h` and `c10/cuda/CUDAAllocatorConfig.h` of PyTorch 2.13 (and two keys of its main
branch); torch_npu's `NPUAllocatorConfig.cpp` and its page on `PYTORCH_NPU_ALLOC_CONF`; MindSpore's `env_var_list` page
and `mem_env.h` up to 2.10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["switch", "integer", "fraction", "divisions", "reserve", "choice", "text"]
"""Form of a value: True or False; whole number; number between 0 and 1; powers of two by size; a share or `40G`; one of
some words; anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One setting that an allocator knows."""

    kind: Kind
    low: float = 0
    """Smallest value, for numbers."""
    high: float = float("inf")
    """Largest value, for numbers."""
    open: bool = False
    """Whether the two ends themselves are refused."""
    power_of_two: bool = False
    choices: tuple[str, ...] = ()
    unit: str = ""
    """Unit of a number, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clash:
    """Two settings of which one makes the other pointless or forbidden."""

    when: Callable[[Mapping[str, str]], bool]
    keys: tuple[str, ...]
    """The settings that are affected, in the order of the message."""
    fact: str
    fix: str
    fatal: bool = False
    """Whether the program stops, instead of going on without a setting."""


def on(settings: Mapping[str, str], key: str) -> bool:
    """Whether a switch is on."""
    return settings.get(key, "").lower() == "true"


def _number(settings: Mapping[str, str], key: str, default: float) -> float:
    try:
        return float(settings.get(key, default))
    except ValueError:
        return default


_MIB: Final = "MiB"
_COMMON: Final[dict[str, Key]] = {
    "max_split_size_mb": Key(kind="integer", low=20, unit=_MIB),
    "max_non_split_rounding_mb": Key(kind="integer", low=20, unit=_MIB),
    "garbage_collection_threshold": Key(kind="fraction", high=1, open=True),
    "roundup_power2_divisions": Key(kind="divisions"),
    "expandable_segments": Key(kind="switch"),
    "large_segment_size_mb": Key(kind="integer", low=11, unit=_MIB),
    "pinned_use_background_threads": Key(kind="switch"),
    "pinned_max_round_threshold_mb": Key(kind="integer", unit=_MIB),
    "pinned_max_cached_size_mb": Key(kind="integer", unit=_MIB),
    "pinned_reserve_segment_size_mb": Key(kind="integer", low=1, unit=_MIB),
    "per_process_memory_fraction": Key(kind="fraction", high=1),
}
CUDA_KEYS: Final[dict[str, Key]] = {
    **_COMMON,
    "backend": Key(kind="choice", choices=("native", "cudaMallocAsync", "hipMallocAsync")),
    "release_lock_on_cudamalloc": Key(kind="switch"),
    "release_lock_on_hipmalloc": Key(kind="switch"),
    "pinned_use_cuda_host_register": Key(kind="switch"),
    "pinned_use_hip_host_register": Key(kind="switch"),
    "pinned_num_register_threads": Key(kind="integer", low=1, high=128, power_of_two=True),
    "pinned_free_catch_all": Key(kind="switch"),
    "graph_capture_record_stream_reuse": Key(kind="switch"),
    "throw_on_cudamalloc_oom": Key(kind="switch"),
    "expandable_segments_reserve": Key(kind="reserve"),
    "expandable_segments_reserve_by_class": Key(kind="text"),
}
NPU_KEYS: Final[dict[str, Key]] = {
    **_COMMON,
    "base_addr_aligned_kb": Key(kind="integer", high=16, unit="KiB"),
    "page_size": Key(kind="choice", choices=("1g",)),
    "segment_size_mb": Key(kind="integer", low=20, high=512, unit=_MIB),
    "multi_stream_lazy_reclaim": Key(kind="switch"),
    "pin_memory_expandable_segments": Key(kind="switch"),
    "pinned_mem_register": Key(kind="switch"),
}
MINDSPORE_KEYS: Final[dict[str, Key]] = {
    "enable_vmm": Key(kind="switch"),
    "vmm_align_size": Key(kind="integer", low=1, unit="MB"),
    "memory_tracker": Key(kind="switch"),
    "memory_tracker_path": Key(kind="text"),
    "simple_tracker": Key(kind="switch"),
    "memory_replay": Key(kind="switch"),
    "memory_recycle": Key(kind="switch"),
    "acl_allocator": Key(kind="switch"),
    "somas_whole_block": Key(kind="switch"),
    "defrag_memory_step_freq": Key(kind="integer"),
    "older_pool": Key(kind="switch"),
    "enable_small_pool": Key(kind="switch"),
    "enable_mem_huge_1g": Key(kind="switch"),
}

_NATIVE_ONLY: Final = (
    "expandable_segments",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "large_segment_size_mb",
)


def _asynchronous(settings: Mapping[str, str]) -> bool:
    return settings.get("backend", "native") in ("cudaMallocAsync", "hipMallocAsync")


def _expandable_and(key: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda settings: on(settings, "expandable_segments") and key in settings


def _asynchronous_and(key: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda settings: _asynchronous(settings) and key in settings


_SPLIT_BELOW_SEGMENT: Final = Clash(
    when=lambda settings: (
        "max_split_size_mb" in settings
        and _number(settings, "max_split_size_mb", 20) < _number(settings, "large_segment_size_mb", 20)
        and _number(settings, "max_split_size_mb", 20) >= 20
    ),
    keys=("max_split_size_mb", "large_segment_size_mb"),
    fact="max_split_size_mb is below large_segment_size_mb, which the allocator refuses",
    fix="raise max_split_size_mb to at least large_segment_size_mb",
    fatal=True,
)
CUDA_CLASHES: Final[tuple[Clash, ...]] = (
    _SPLIT_BELOW_SEGMENT,
    *(
        Clash(
            when=_asynchronous_and(key),
            keys=(key, "backend"),
            fact=f"{key} has no effect: only the native allocator knows it, and backend names another one",
            fix=f"remove {key}, or set backend:native",
        )
        for key in _NATIVE_ONLY
    ),
    Clash(
        when=_expandable_and("max_split_size_mb"),
        keys=("max_split_size_mb", "expandable_segments"),
        fact="max_split_size_mb and expandable_segments:True work against each other: a segment that expands is split "
        "at any size, and large free parts of it are then refused to smaller requests",
        fix="keep expandable_segments:True and remove max_split_size_mb",
    ),
    Clash(
        when=_expandable_and("garbage_collection_threshold"),
        keys=("garbage_collection_threshold", "expandable_segments"),
        fact="garbage_collection_threshold has no effect on segments that expand: only whole ordinary segments are "
        "collected",
        fix="remove garbage_collection_threshold",
    ),
    Clash(
        when=lambda settings: (
            "garbage_collection_threshold" in settings
            and "per_process_memory_fraction" not in settings
            and not on(settings, "expandable_segments")
            and not _asynchronous(settings)
        ),
        keys=("garbage_collection_threshold",),
        fact="garbage_collection_threshold is a share of the memory that the process is allowed, and does nothing "
        "while that is not limited",
        fix="call torch.cuda.set_per_process_memory_fraction(1.0) at the start, or remove it",
    ),
    Clash(
        when=lambda settings: (
            "pinned_num_register_threads" in settings
            and not on(settings, "pinned_use_cuda_host_register")
            and not on(settings, "pinned_use_hip_host_register")
        ),
        keys=("pinned_num_register_threads",),
        fact="pinned_num_register_threads has no effect without pinned_use_cuda_host_register:True",
        fix="add pinned_use_cuda_host_register:True, or remove it",
    ),
)
NPU_CLASHES: Final[tuple[Clash, ...]] = (
    _SPLIT_BELOW_SEGMENT,
    *(
        Clash(
            when=_expandable_and(key),
            keys=(key, "expandable_segments"),
            fact=f"torch_npu refuses {key} together with expandable_segments:True",
            fix=f"remove {key}",
            fatal=True,
        )
        for key in ("max_split_size_mb", "garbage_collection_threshold")
    ),
    *(
        Clash(
            when=lambda settings, key=key: key in settings and not on(settings, "expandable_segments"),
            keys=(key,),
            fact=f"{key} has no effect without expandable_segments:True",
            fix=f"add expandable_segments:True, or remove {key}",
        )
        for key in ("base_addr_aligned_kb", "segment_size_mb")
    ),
    Clash(
        when=lambda settings: "segment_size_mb" in settings and "large_segment_size_mb" in settings,
        keys=("segment_size_mb", "large_segment_size_mb"),
        fact="segment_size_mb has no effect beside large_segment_size_mb, which replaces it",
        fix="remove segment_size_mb",
    ),
    *(
        Clash(
            when=lambda settings, key=key: "page_size" in settings and key in settings,
            keys=(key, "page_size"),
            fact=f"{key} has no effect beside page_size, which sets the size of segments",
            fix=f"remove {key}",
        )
        for key in ("segment_size_mb", "large_segment_size_mb")
    ),
    Clash(
        when=lambda settings: on(settings, "pinned_mem_register") and on(settings, "pin_memory_expandable_segments"),
        keys=("pinned_mem_register", "pin_memory_expandable_segments"),
        fact="pinned_mem_register is switched off by pin_memory_expandable_segments:True",
        fix="remove one of them",
    ),
)
MINDSPORE_CLASHES: Final[tuple[Clash, ...]] = (
    *(
        Clash(
            when=lambda settings, key=key: key in settings and not on(settings, "memory_tracker"),
            keys=(key,),
            fact=f"{key} has no effect without memory_tracker:True",
            fix="add memory_tracker:True",
        )
        for key in ("memory_tracker_path", "simple_tracker")
    ),
    Clash(
        when=lambda settings: "vmm_align_size" in settings and settings.get("enable_vmm", "True").lower() == "false",
        keys=("vmm_align_size", "enable_vmm"),
        fact="vmm_align_size has no effect with enable_vmm:False",
        fix="remove one of them",
    ),
)
