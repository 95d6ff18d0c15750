"""`evenload profile`: from a model to a measured profile, in every process of a run."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.profile.measured import Conditions, Measured, digest_of
from evenload.runtime.launch import agreed, joined, together
from evenload.runtime.measure import WARM_UP, measure, trace
from evenload.runtime.pace import code_of
from evenload.runtime.ranks import own_device
from evenload.runtime.settings import RunSettings
from evenload.runtime.train import Source, build
from evenload.setup import Setup


def profile_model(
    source: Source,
    name: str,
    setup: Setup,
    settings: RunSettings,
    *,
    rounds: int,
    bandwidth: float | None = None,
    tell: Callable[[str], object] | None = None,
) -> Measured:
    """Measure a model here; called in every process that torchrun has started, or in one that nobody has.

    Args:
        source: a Hugging Face configuration, or a function that makes a decoder.
        name: what names it.
        setup: of one stage with one micro-batch.
        settings: of the run: whose code, where the layers are, autocast and the optimizer.
        rounds: how often everything runs.
        bandwidth: bytes a second between two processes; None: measured where there are two.
        tell: called with lines about the progress.

    Raises:
        EvenloadError: the model cannot be traced, cut or run; `launch.Silent` on all ranks but one.
    """
    with joined(int(os.environ.get("WORLD_SIZE", "1")), timeout=settings.timeout), together():
        return profile_here(source, name, setup, settings, rounds=rounds, bandwidth=bandwidth, tell=tell)


def profile_here(
    source: Source,
    name: str,
    setup: Setup,
    settings: RunSettings,
    *,
    rounds: int,
    bandwidth: float | None = None,
    tell: Callable[[str], object] | None = None,
) -> Measured:
    """`profile_model` in the process group that there is."""
    device = own_device()
    with agreed():
        plan = Plan(setup=setup, layout=Layout.even(1, pp=1), policy=Policy(), model=name)
        make = build(source, plan, settings.implementation)
        if tell is not None:
            tell("tracing the layers")
        traced = trace(make, setup, settings, name=name, device=device.type)

    def progress(done: int) -> None:
        if tell is not None and done % max(1, rounds // 4) == 0 and done > WARM_UP:
            tell(f"round {done - WARM_UP} of {rounds}")

    times = measure(make, traced, setup, settings, rounds=rounds, device=device, tell=progress)
    return Measured(
        model=name,
        digest=digest_of(name if callable(source) else source),
        setup=setup,
        conditions=_conditions(source, settings, device, rounds=rounds, share=times.share),
        traced=traced,
        times=times.kinds,
        chunk=times.chunk,
        transfer=times.transfer,
        bandwidth=bandwidth,
    )


def _conditions(
    source: Source, settings: RunSettings, device: torch.device, *, rounds: int, share: float | None
) -> Conditions:
    return Conditions(
        device="cuda" if device.type == "cuda" else "cpu",
        hardware=torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
        processes=distributed.get_world_size(),
        rounds=rounds,
        code="own" if callable(source) else code_of(settings.implementation),
        autocast=settings.autocast,
        adamw=settings.adamw,
        share=share,
    )


def processor() -> str:
    """What the processor calls itself, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
