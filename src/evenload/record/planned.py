"""The dry run of a plan: the model of a configuration, trained as a setup says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from evenload.errors import EvenloadError
from evenload.ledger.ledger import Ledger
from evenload.plan.plan import Plan
from evenload.plan.policy import Recompute
from evenload.record.hugging_face import model_builder, token_batches
from evenload.record.real import real_steps
from evenload.record.rehearsal import Place, Rehearsal
from evenload.record.runs import Prepared, record_steps
from evenload.record.targets import find_target
from evenload.record.training import OptimizerName, Training, make_optimizer
from evenload.setup import Setup

DTYPES: Final[Mapping[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DEGREES: Final = ("pp", "interleave", "tp", "cp", "dp", "ep")
_ONE_DEVICE: Final = "a dry run runs the whole model on one device"


def prepare_plan(
    config: Mapping[str, Any],
    plan: Plan,
    *,
    device: str = "cuda",
    steps: int = 2,
    autocast: torch.dtype | None = None,
    optimizer: OptimizerName | None = None,
    full: bool = False,
    real: bool = False,
    count: int | None = None,
) -> Callable[[], Ledger]:
    """Make a function that runs training steps of a plan without its devices; the imports are done by then.

    Args:
        config: the model, as a Hugging Face configuration.
        plan: how it is trained.
        device: the device that the run is for.
        steps: how many steps to run.
        autocast: type in which forward runs under autocast.
        optimizer: in place of the one that the setup names.
        full: run every layer, also those that do exactly what others do.
        real: run it in earnest, on a device that is here.
        count: layers that run then; None: all.

    Raises:
        EvenloadError: PyTorch has no such run, or the model cannot be built from the configuration.
    """
    check_runnable(plan)
    setup = plan.setup
    target = find_target(device)
    where = plan.model or "config.json"
    build = model_builder(config, where=where, dtype=DTYPES[setup.dtype], attention=setup.attention)
    meta = not real and target.accelerator and autocast is None and optimizer != "adamw-fused"

    stand_in = "meta" if meta else "cpu"

    def prepare(_: Place) -> Prepared:
        with torch.device(stand_in):
            model = build()
        return Prepared(
            model=model,
            training=Training(
                batch=token_batches(model, micro_batch=setup.micro_batch, seq=setup.seq, device=stand_in),
                micro_batches=setup.micro_batches,
                autocast=autocast,
                device=target.kind,
            ),
            optimizer=partial(make_optimizer, optimizer or setup.optimizer),
            recompute=plan.policy.full,
        )

    def go() -> Ledger:
        if real:
            return real_steps(prepare, target, steps=steps, count=count)
        place = partial(Rehearsal, target, engine="meta" if meta else "fake", redirect=False)
        return record_steps(place, prepare, steps=steps, full=full)

    return go


def check_runnable(plan: Plan) -> None:
    """Make sure that plain PyTorch runs what a plan says.

    Raises:
        EvenloadError: it does not; with what to say instead.
    """
    setup = plan.setup
    _check(
        setup,
        *((name, getattr(setup, name) > 1, _ONE_DEVICE, f"leave {name} at 1") for name in _DEGREES),
        ("zero", setup.zero > 0, _ONE_DEVICE, "leave zero at 0"),
    )
    check_trainable(plan)
    partial = [layer for layer in range(plan.layout.num_layers) if _selective(plan, layer)]
    if partial:
        raise EvenloadError(
            f"layer {partial[0]} recomputes single operators, and a dry run recomputes whole layers",
            where="$.policy",
            fix="use --recompute full or none, or ask evenload estimate",
        )


def check_trainable(plan: Plan) -> None:
    """Make sure that PyTorch's own modules and optimizers train as a plan says, on however many devices.

    Raises:
        EvenloadError: they do not; with what to say instead.
    """
    setup = plan.setup
    _check(
        setup,
        ("backend", setup.backend != "torch", "a dry run executes PyTorch's own modules", "use --backend torch"),
        ("cp", setup.cp > 1, "a dry run does not divide attention along the sequence", "leave cp at 1"),
        ("ep", setup.ep > 1, "a dry run does not deal experts to ranks", "leave ep at 1"),
        ("dtype", setup.dtype not in DTYPES, "no PyTorch module computes in it by itself", "use bf16, fp16 or fp32"),
        *_type_rules(setup),
    )


def _check(setup: Setup, *rules: tuple[str, bool, str, str]) -> None:
    """Raise for the first of (field, whether it is wrong, why, what to do) that is wrong."""
    for name, wrong, why, fix in rules:
        if wrong:
            raise EvenloadError(
                f"{name} is {getattr(setup, name)}, and {why}",
                where=f"$.{name}",
                fix=f"{fix}, or ask evenload estimate",
            )


def _type_rules(setup: Setup) -> tuple[tuple[str, bool, str, str], ...]:
    """PyTorch keeps gradients and moments in the type of the parameters."""
    same = "PyTorch's own optimizers keep it in the type of the parameters"
    return (
        (
            "master_weights",
            setup.main_copies and not setup.fsdp_mixed,
            "PyTorch's own optimizers have no main copies",
            "use --dtype fp32 with --autocast bf16",
        ),
        ("grad_dtype", setup.gradient_dtype != setup.parameter_dtype, same, "leave grad_dtype out"),
        ("optimizer_dtype", setup.moment_dtype != setup.parameter_dtype, same, "leave optimizer_dtype out"),
    )


def _selective(plan: Plan, layer: int) -> bool:
    return plan.for_layer(layer).choice not in {Recompute.NONE, Recompute.FULL}
