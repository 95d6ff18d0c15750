"""MindFormers r1.x: degrees, sizes and types of the run, and the memory of a device."""

from __future__ import annotations

from typing import Any, Final

from evenload.dialects.mindformers_settings import Sections, Settings
from evenload.dialects.typed import at, shown
from evenload.errors import EvenloadError
from evenload.plan.schedule import find_schedule
from evenload.setup import DType, Setup
from evenload.units import parse_bytes

MODEL: Final[Sections] = (("model", "model_config"), ("model_config",), ())
PARALLEL: Final[Sections] = (("parallel_config",), ())
PIPELINE: Final[Sections] = (("parallel", "pipeline_config"), ("pipeline_config",), ())
_PARALLEL_CONTEXT: Final[Sections] = (("parallel",), ())
_OPTIMIZER: Final[Sections] = (("parallel", "parallel_optimizer_config"),)
_CONTEXT: Final[Sections] = (("context",), ())
_RUNNER: Final[Sections] = (("runner_config",), ())

TYPES: Final[dict[str, DType]] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""MindSpore's names of data types."""
_SPLIT_SEQUENCE: Final = ("seqpipe", "seqvpp", "seqsmartvpp")
_LEVELS: Final = {"level1": 1, "level2": 2, "level3": 3}

SETUP_PATHS: Final[dict[str, tuple[Sections, str]]] = {
    "pp": (PARALLEL, "pipeline_stage"),
    "interleave": (MODEL, "pp_interleave_num"),
    "tp": (PARALLEL, "model_parallel"),
    "cp": (PARALLEL, "context_parallel"),
    "dp": (PARALLEL, "data_parallel"),
    "ep": (PARALLEL, "expert_parallel"),
    "micro_batch": (_RUNNER, "batch_size"),
    "micro_batches": (PARALLEL, "micro_batch_num"),
    "seq": (MODEL, "seq_length"),
    "dtype": (MODEL, "compute_dtype"),
}
"""Field of `Setup` -> where MindFormers has it."""


def read_setup(settings: Settings, *, pp: int, interleave: int) -> Setup:
    """The run that the settings describe, for the MindSpore backend on an Ascend 910B.

    Raises:
        EvenloadError: a value that no run has; with its place.
    """
    fused = settings.number((*PARALLEL,), "micro_batch_interleave_num", absent=1, quiet=True)
    values: dict[str, Any] = {
        "pp": pp,
        "interleave": interleave,
        "tp": settings.number(PARALLEL, "model_parallel", absent=1),
        "sequence_parallel": settings.switch(PARALLEL, "use_seq_parallel") or False,
        "cp": settings.number(PARALLEL, "context_parallel", absent=1, quiet=True),
        "dp": settings.number(PARALLEL, "data_parallel", absent=1),
        "ep": settings.number(PARALLEL, "expert_parallel", absent=1, quiet=True),
        "zero": _zero(settings),
        "micro_batch": settings.number(_RUNNER, "batch_size", absent=1, quiet=True) * fused,
        "micro_batches": settings.number(PARALLEL, "micro_batch_num", absent=1, quiet=pp == 1),
        "seq": settings.number(MODEL, "seq_length", absent=4096),
        "dtype": _type(settings, "compute_dtype") or "bf16",
        "attention": "eager" if settings.switch(MODEL, "use_flash_attention") is False else "sdpa",
        "backend": "mindspore",
        "schedule": _schedule(settings, interleave),
        "hardware": "ascend-910b",
    }
    if fused > 1:
        settings.note(
            f"micro_batch_interleave_num {fused} runs {fused} micro-batches side by side: counted as one of "
            f"{values['micro_batch']} sequences",
            *(settings.path(PARALLEL, "micro_batch_interleave_num") or ()),
        )
    if _type(settings, "param_init_type", "params_dtype") == "fp32" and values["dtype"] != "fp32":
        values |= {"master_weights": True, "grad_dtype": "fp32"}
    try:
        return Setup(**values)
    except EvenloadError as error:
        name = (error.where or "").removeprefix("$.")
        sections, key = SETUP_PATHS.get(name, ((), ""))
        place = settings.source.where(*(settings.path(sections, key) or ()))
        raise EvenloadError(
            error.fact.replace(name, key, 1) if key else error.fact, where=place, fix=error.fix
        ) from None


def read_limit(settings: Settings) -> int | None:
    """Memory of one device in bytes. MindSpore's `58GB` is 58 * 2**30 bytes.

    Raises:
        EvenloadError: no size.
    """
    text = settings.value(_CONTEXT, "max_device_memory")
    if text is None:
        return None
    place = settings.source.where(*(settings.path(_CONTEXT, "max_device_memory") or ()))
    if isinstance(text, bool) or not isinstance(text, str):
        raise EvenloadError(f"max_device_memory is {shown(text)}", where=place, fix='write it as "58GB"')
    binary = text.strip()
    if binary.upper().endswith("GB"):
        binary = binary[:-2] + "GiB"
    return parse_bytes(binary, where=place)


def _zero(settings: Settings) -> int:
    """ZeRO stage of `enable_parallel_optimizer`: optimizer states, with `gradient_accumulation_shard` gradients too."""
    if not settings.switch(_PARALLEL_CONTEXT, "enable_parallel_optimizer"):
        return 0
    level = settings.word(_OPTIMIZER, "optimizer_level")
    if level is not None:
        if level not in _LEVELS:
            path = settings.path(_OPTIMIZER, "optimizer_level") or ()
            raise settings.source.error(f"optimizer_level is {level!r}", *path, fix=f"use one of {', '.join(_LEVELS)}")
        return _LEVELS[level]
    return 2 if settings.switch(_OPTIMIZER, "gradient_accumulation_shard") else 1


def _type(settings: Settings, *names: str) -> DType | None:
    path = settings.path(MODEL, *names)
    if path is None:
        return None
    value = at(settings.source, path)
    if not isinstance(value, str) or value not in TYPES:
        raise settings.source.error(f"{path[-1]} is {shown(value)}", *path, fix=f"use one of {', '.join(TYPES)}")
    return TYPES[value]


def _schedule(settings: Settings, interleave: int) -> str:
    """What evenload calls the `pipeline_scheduler`; MindSpore writes 1f1b for the interleaved order too."""
    name = settings.word(PIPELINE, "pipeline_scheduler") or "1f1b"
    path = settings.path(PIPELINE, "pipeline_scheduler") or ()
    if name in _SPLIT_SEQUENCE:
        settings.note(f"the schedule {name} splits sequences, which a plan does not hold yet; taken as 1f1b", *path)
        name = "1f1b"
    if name == "zero_bubble_v":
        raise settings.source.error(
            "zero_bubble_v deals its second interleave in reverse, which evenload does not read yet",
            *path,
            fix="use 1f1b or gpipe",
        )
    if name == "1f1b":
        return "1f1b" if interleave == 1 else "mindspore_interleaved"
    try:
        return find_schedule(name, interleave=interleave).name
    except EvenloadError as error:
        raise error.at(settings.source.where(*path)) from None
