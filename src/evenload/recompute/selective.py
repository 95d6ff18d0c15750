"""The same policy for compiled blocks, as a context for torch's own selective checkpoint.

Under `torch.compile(fullgraph=True)` saved-tensor hooks cannot stand round a block. Torch's selective checkpoint can:
it keeps the results of calls that a policy names, and the compiler computes the rest again. What to keep is decided
here as always, and told to it call by call. The layer's input is always kept; where backward needs nothing else from
it, that is the price.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils import checkpoint as checkpointing

from evenload.plan.policy import LayerPolicy
from evenload.recompute.handle import Handle
from evenload.recompute.layer_graph import label
from evenload.recompute.layer_plan import LayerPlan
from evenload.recompute.policies import as_policy
from evenload.recompute.report import KindReport
from evenload.recompute.stand_in import require_none
from evenload.recompute.state import LayerState


@dataclass(frozen=True, kw_only=True)
class Selective:
    """A policy in the form that `torch.utils.checkpoint` takes."""

    saved: Mapping[Any, frozenset[int]]
    """Operator -> which of its calls, counted from 0, have their results kept."""
    kept_bytes: int
    """What one layer keeps for backward, parameters left out."""
    before: int
    """What it keeps without recomputation."""
    not_expressed: tuple[str, ...]
    """What the policy asks for and this form cannot say, one sentence each."""
    report: KindReport
    """What the engine would do with the same policy."""

    context_fn: Callable[[], tuple[Any, Any]] = field(compare=False)
    """For `checkpoint(block, ..., use_reentrant=False, context_fn=...)` and for checkpoint wrappers."""


def _context_fn(saved: Mapping[Any, frozenset[int]]) -> Callable[[], tuple[Any, Any]]:
    """A function that the compiler takes, so no method: it makes a new pair of modes for every forward."""

    def contexts() -> tuple[Any, Any]:
        calls: defaultdict[Any, int] = defaultdict(int)

        def policy(_context: Any, func: Any, *_args: Any, **_kwargs: Any) -> checkpointing.CheckpointPolicy:
            number = calls[func]
            calls[func] += 1
            keep = number in saved.get(func, ())
            return checkpointing.CheckpointPolicy.MUST_SAVE if keep else checkpointing.CheckpointPolicy.PREFER_RECOMPUTE

        return cast("Any", checkpointing).create_selective_checkpoint_contexts(policy)

    return contexts


def selective_checkpoint(
    layer: torch.nn.Module, policy: LayerPolicy | Iterable[str], *args: Any, **kwargs: Any
) -> Selective:
    r"""Decide what one layer keeps, for torch's selective checkpoint.

    The layer runs once on fake tensors: nothing is computed, and it may be compiled before or afterwards.

    Args:
        layer: a block; it stays as it is.
        policy: what is recomputed on it, or patterns.
        args: what it is called with, in shapes and types as in training; those of floating point get a gradient.
        kwargs: likewise, without gradient.

    Raises:
        EvenloadError: a pattern cannot be read, or the layer cannot run on fake tensors.

    Examples:
        >>> chosen = selective_checkpoint(block, [r"mlp\.mul", r"mlp\.act_fn\.silu"], x)  # doctest: +SKIP
        >>> checkpoint(block, x, use_reentrant=False, context_fn=chosen.context_fn)  # doctest: +SKIP
    """
    layer = getattr(layer, "_orig_mod", layer)
    require_none(layer, type(layer).__name__)
    own = as_policy(policy, (), (), (), 1).for_layer(0)
    state = LayerState(layer=layer, name=type(layer).__name__, policy=own)
    with torch.compiler.set_stance("force_eager"), Handle(layer, [state]) as handle:
        report = handle.rehearse(*map(_with_gradient, args), **kwargs)
        (plan,) = handle.plans().values()
    return _selective(plan, report.kinds[0])


def _with_gradient(argument: Any) -> Any:
    """A layer's input as it comes from the layer before, whatever the user had at hand."""
    if isinstance(argument, torch.Tensor) and argument.is_floating_point() and not argument.requires_grad:
        return argument.detach().requires_grad_()
    return argument


def _selective(plan: LayerPlan, report: KindReport) -> Selective:
    graph, numbers = plan.everything, plan.graph.numbers
    producers = {value: step for step in plan.trace for value in step.results}
    written = {write.after for step in plan.trace for write in step.writes}
    position: dict[int, tuple[Any, int]] = {}
    calls: Counter[Any] = Counter()
    for step in plan.trace:
        position[step.number] = step.func, calls[step.func]
        calls[step.func] += 1
    saved: defaultdict[Any, set[int]] = defaultdict(set)
    nbytes = 0 if graph.by_name[graph.input].held else graph.nbytes(graph.input)
    notes: list[str] = []
    if graph.input not in plan.decision.kept and nbytes:
        notes.append("torch's checkpoint keeps the layer's input, which nothing else needs")
    names = {number: name for name, number in numbers.items()}
    counted: set[int] = set()
    for name in plan.decision.kept:
        value = numbers.get(name)
        if name == graph.input or value is None or value not in producers:
            continue
        step = producers[value]
        if value in written:
            notes.append(f"{label(step)} writes in place, so that its result is computed again and not kept")
            continue
        func, number = position[step.number]
        saved[func].add(number)
        counted.update(step.results)
        beside = [names[other] for other in step.results if names[other] not in plan.decision.kept]
        if beside:
            notes.append(f"{label(step)} is kept with all its results, {', '.join(beside)} among them")
    nbytes += sum(graph.nbytes(names[value]) for value in counted)
    chosen = {func: frozenset(calls) for func, calls in saved.items()}
    return Selective(
        saved=chosen,
        context_fn=_context_fn(chosen),
        kept_bytes=nbytes,
        before=graph.kept_bytes,
        not_expressed=tuple(dict.fromkeys(notes)),
        report=report,
    )
