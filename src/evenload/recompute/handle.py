"""`apply`: puts the engine round the layers of a model, and the handle that takes it off again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Self

import torch

from evenload.errors import EvenloadError
from evenload.plan.operators import Graph
from evenload.plan.policy import LayerPolicy, Policy
from evenload.recompute._torch_private import gathers_again, is_compiled
from evenload.recompute.full import Group, Slicing, divided_by_fsdp, gather_again, sharing_ranks
from evenload.recompute.layer_plan import LayerPlan
from evenload.recompute.layers import Named, find_layers
from evenload.recompute.likeness import Key
from evenload.recompute.policies import as_policy
from evenload.recompute.rehearsal import rehearse as rehearse_module
from evenload.recompute.report import Report, make_report
from evenload.recompute.stand_in import put_on, require_none
from evenload.recompute.state import LayerState

Whole = Literal["auto", "checkpoint", "engine"]


class Handle:
    """Recomputation on the layers of one model.

    `remove` ends it; as a context manager it ends with the block.
    """

    def __init__(
        self, module: torch.nn.Module, states: Sequence[LayerState], restore: Callable[[], None] = lambda: None
    ) -> None:
        self._module: Final = module
        self._states: Final = tuple(states)
        self._restore = restore
        self._stand_ins: Final = tuple(map(put_on, self._states))

    def remove(self) -> None:
        """Give every layer its own forward back. What was saved for a backward that is still to come stays good."""
        for one in self._stand_ins:
            one.remove()
        restore, self._restore = self._restore, _nothing
        restore()

    def report(self) -> Report:
        """What recomputation does, layer kind by layer kind, as far as the layers have run."""
        return make_report(self._states)

    def rehearse(self, *args: Any, **kwargs: Any) -> Report:
        """Record the layers by running the model once on fake tensors: no memory, no computation, no gradients.

        The first real forward on arguments of the same shapes then follows the plans at once, unless the model itself
        treats fake tensors otherwise (Hugging Face models make an attention mask for them).

        Args:
            args: what the model is called with.
            kwargs: likewise.

        Raises:
            EvenloadError: the model cannot run on fake tensors, because its code depends on data.
        """
        rehearse_module(self._module, args, kwargs)
        return self.report()

    def graphs(self) -> Mapping[str, Graph]:
        """The operators of every layer that has run, by the layer's path."""
        return {name: plan.everything for name, plan in self.plans().items()}

    def plans(self) -> Mapping[str, LayerPlan]:
        """The plan of every layer's last forward, by the layer's path."""
        return {state.name: state.last for state in self._states if state.last is not None}

    def saved_tensors(self) -> Mapping[str, int]:
        """How many tensors autograd saved in the last forward of every layer that has run, by the layer's path."""
        return {name: len(plan.saves) for name, plan in self.plans().items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply(
    module: torch.nn.Module,
    policy: Policy | LayerPolicy | Mapping[str, Any] | Iterable[str] = (),
    *,
    select: Iterable[str] = (),
    exclude: Iterable[str] = (),
    comm: Iterable[str] = (),
    layers: str | Iterable[str] | None = None,
    whole: Whole = "auto",
    rehearse: bool = False,
    optimizer_comm: bool | None = None,
    tensor_group: Group | None = None,
) -> Handle:
    r"""Recompute operators of a model's repeated layers in backward instead of keeping their results.

    Args:
        module: the model; neither its structure nor its `state_dict` changes.
        policy: what is recomputed on which layer: a `Policy`; a `LayerPolicy` or patterns for all layers; or a mapping
            of patterns to True or the numbers of the layers.
        select: in the place of `policy`, patterns of operators for all layers.
        exclude: operators that stay kept although a pattern of `select` names them.
        comm: operators whose communication is run again instead of keeping what it brought.
        layers: path of the container that holds the layers, or several, where it is not obvious; the empty path is the
            module itself, as one layer.
        whole: what recomputes whole layers. `checkpoint` is `torch.utils.checkpoint`; `engine` keeps the input and runs
            operators again, which is right where backward comes in parts (zero-bubble schedules) and where the results
            of some operators stay kept; `auto` takes the engine only for the latter.
        rehearse: record every layer on fake tensors just before it first runs. Else the first real forward is recorded,
            for which one layer at a time holds all its intermediate results.
        optimizer_comm: let FSDP gather parameters again in backward (True) or keep them (False). None: as the policy
            says if it says True, else as FSDP was set up.
        tensor_group: ranks of tensor parallelism, for `slice_activation`, where no parameter tells.

    Raises:
        EvenloadError: a pattern cannot be read, the policy names a layer that the model does not have or contradicts
            itself, or the layers cannot be found.

    Examples:
        >>> handle = apply(model, select=[r"mlp\.mul", r"mlp\.act_fn\.silu"])  # doctest: +SKIP
        >>> print(handle.report())  # doctest: +SKIP
        >>> handle.remove()  # doctest: +SKIP
    """
    named = find_layers(module, layers)
    decided = as_policy(policy, select, exclude, comm, len(named))
    _require_apart(named)
    _require_free(module, named)
    states = [_state(one, decided, decided.for_layer(number), whole, tensor_group) for number, one in enumerate(named)]
    kin: dict[Key, LayerPlan] = {}
    for number, state in enumerate(states):
        state.rehearse, state.number, state.kin = rehearse, number, kin
    again = optimizer_comm if optimizer_comm is not None else decided.optimizer_comm or None
    return Handle(module, states, _set_gathering([layer for _, layer in named], again))


def _state(named: Named, policy: Policy, own: LayerPolicy, whole: Whole, group: Group | None) -> LayerState:
    name, layer = named
    if whole not in {"auto", "checkpoint", "engine"}:
        raise EvenloadError(f"{whole!r} recomputes nothing", where="$.whole", fix="write auto, checkpoint or engine")
    keeps_some = bool(own.select_exclude or own.comm_exclude or not policy.mp_comm)
    if own.full and keeps_some and whole == "checkpoint":
        raise EvenloadError(
            f"layer {name!r} is to be recomputed whole by torch.utils.checkpoint, and to keep some results",
            where="$.whole",
            fix="write whole='auto', or leave `mp_comm` on and the exclude patterns out",
        )
    checkpoint = own.full and (whole == "checkpoint" or (whole == "auto" and not keeps_some))
    if own.full and policy.slice_activation and not checkpoint:
        raise EvenloadError(
            f"layer {name!r} is to keep a slice of its input, which only torch.utils.checkpoint does here",
            where="$.policy.slice_activation",
            fix="leave `mp_comm` on and the exclude patterns out, or switch `slice_activation` off",
        )
    slicing = None
    if checkpoint and policy.slice_activation:
        slicing = Slicing(sharing_ranks(layer, name, group))
    return LayerState(layer=layer, name=name, policy=own, whole=checkpoint, mp_comm=policy.mp_comm, slicing=slicing)


def _require_apart(named: Sequence[Named]) -> None:
    """No layer is named twice, or lies in another."""
    names: dict[int, str] = {}
    for name, layer in named:
        if id(layer) in names:
            raise EvenloadError(
                f"{names[id(layer)]!r} and {name!r} are one layer", where="$.layers", fix="name every layer once"
            )
        names[id(layer)] = name
    for name, layer in named:
        for inner in layer.modules():
            if inner is not layer and id(inner) in names:
                raise EvenloadError(
                    f"layer {names[id(inner)]!r} lies in layer {name!r}", where="$.layers", fix="name one of them"
                )


def _require_free(module: torch.nn.Module, named: Sequence[Named]) -> None:
    """No layer is recomputed, or checkpointed, already."""
    for name, layer in named:
        require_none(layer, name, module)
        if any(map(is_compiled, layer.modules())):
            raise EvenloadError(
                f"layer {name!r} is compiled, or something in it is, so that its operators cannot be seen",
                fix="use `evenload.recompute.selective_checkpoint` for compiled blocks, or leave them uncompiled",
            )
        if getattr(layer, "gradient_checkpointing", False):
            raise EvenloadError(
                f"layer {name!r} is checkpointed already, so that recomputing operators in it would change nothing",
                fix="call `model.gradient_checkpointing_disable()` first",
            )


def _set_gathering(layers: list[torch.nn.Module], again: bool | None) -> Callable[[], None]:
    """Set what FSDP does, and return what undoes it."""
    if again is None:
        return _nothing
    before = [(layer, gathers_again(layer)) for layer in divided_by_fsdp(layers)]
    for layer, _ in before:
        gather_again(layer, again)

    def undo() -> None:
        for layer, was in before:
            gather_again(layer, was)

    return undo


def _nothing() -> None:
    """Nothing to undo."""
