"""The engine: stands round the forward of a layer, records it once, and follows the plan ever after."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from evenload.recompute._torch_private import is_empty, storage_key
from evenload.recompute.aten import is_unequal
from evenload.recompute.errors import RecomputeError
from evenload.recompute.follow import Follower
from evenload.recompute.frame import Dropped, Frame, let_go, unpack
from evenload.recompute.full import run_whole
from evenload.recompute.layer_plan import LayerPlan, make_plan
from evenload.recompute.likeness import Key, Watch, arguments_key, surroundings
from evenload.recompute.program import Cell
from evenload.recompute.proof import first_difference
from evenload.recompute.recording import Recorder
from evenload.recompute.rehearsal import can_rehearse, rehearse
from evenload.recompute.state import LayerState
from evenload.recompute.surroundings import require_room
from evenload.recompute.values import Recording
from evenload.recompute.wrappers import tensors, unwrap


class Call(NamedTuple):
    """One call of a layer."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    """Tensors among the arguments, in order."""

    def run(self) -> Any:
        """The layer's own code."""
        return self.forward(*self.args, **self.kwargs)


def run(state: LayerState, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a layer's forward under its policy."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    require_room(state.layer, state.name)
    if state.whole:
        state.served["checkpoint"] += 1
        return run_whole(forward, args, kwargs, state.slicing)
    call = Call(forward, args, kwargs, [])
    of_arguments = arguments_key((args, kwargs), call.tensors)
    around = surroundings(call.tensors[0].device.type if call.tensors else "cpu")
    if state.watch is not None:
        key = (of_arguments, around, state.watch.key())
        plan = state.plans.get(key)
        if plan is not None:
            return _follow(state, key, plan, call)
    state.watch = Watch(state.layer)  # anew: other modules may be inside by now
    key = (of_arguments, around, state.watch.key())
    fake = any(map(_is_fake, call.tensors))
    plan = state.offered(key, fake=fake)
    if plan is not None:
        state.unproved.add(key)
        return _follow(state, key, plan, call, compare=True)
    if state.rehearse and not state.mismatches[key] and can_rehearse((args, kwargs)):
        with suppress(RecomputeError):
            rehearse(state.layer, args, kwargs)
        plan = state.plans.get(key)
        if plan is not None:
            return _follow(state, key, plan, call)
    return _record(state, key, call)


def _follow(state: LayerState, key: Key, plan: LayerPlan, call: Call, *, compare: bool = False) -> Any:
    frame = Frame(plan)
    frame.start(state.layer, call.tensors)
    try:
        if plan.path == "hooks" and not plan.from_modules and not compare:
            with saved_tensors_hooks(frame.pack, unpack):
                result = call.run()
        else:
            follower = Follower(frame, state.layer, call.tensors) if compare or plan.path == "mode" else None
            result = _run_watched(state.layer, frame, call, follower)
        if key in state.unproved and frame.prove():
            state.unproved.discard(key)
        frame.finish()
    finally:
        frame.close()
    state.last = plan
    _note_held(state, plan, call, result)
    if frame.mismatch is not None:
        state.left(key, frame.mismatch)
    elif compare:
        state.served["compared"] += 1
        state.remember(key, plan)
    else:
        state.served[plan.path] += 1
    return result


def _note_held(state: LayerState, plan: LayerPlan, call: Call, result: Any) -> None:
    """Remember which arguments are kept to start from, because others may keep the same.

    Several layers may get one mask; and what one layer keeps because its last operator saves it, the next one gets.
    """
    state.output = None
    returned = next(tensors(result), None) if plan.keeps_output else None
    if returned is not None:
        plain = unwrap(returned)[0]
        state.output = storage_key(plain) if plain is not None else None
    for leaf, position in plan.given:
        plain = unwrap(call.tensors[position])[0]
        if plain is not None:
            one = plan.program.leaves[leaf]
            state.given[one.label] = storage_key(plain), plan.graph.graph.nbytes(one.label)


def _run_watched(layer: torch.nn.Module, frame: Frame, call: Call, follower: Follower | None) -> Any:
    """Run a layer, taking also what passes inside it."""
    if follower is not None:
        frame.shown = follower.shown
    with ExitStack() as stack:
        for path, end in frame.plan.from_modules:
            stack.callback(_tap(layer.get_submodule(path), path, end, frame).remove)
        stack.enter_context(saved_tensors_hooks(frame.pack, unpack))
        if follower is not None:
            stack.enter_context(follower)
        result = call.run()
    if follower is not None:
        follower.finish()
    return result


def _tap(module: torch.nn.Module, path: str, end: str, frame: Frame) -> Any:
    """A hook that shows a frame what enters or leaves a module."""

    def enter(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        frame.seen(path, end, (args, kwargs))

    def leave(_module: torch.nn.Module, _args: Any, result: Any) -> None:
        frame.seen(path, end, result)

    if end == "in":
        return module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    return module.register_forward_hook(leave)


def _is_fake(tensor: torch.Tensor) -> bool:
    plain = unwrap(tensor)[0]
    return plain is not None and is_empty(plain)


class _Slots:
    """The saved-tensor hook of a layer that is recorded. Autograd holds on to it, so it must let go of everything."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder: Recorder | None = recorder
        self._slots: list[Dropped] = []

    def pack(self, tensor: torch.Tensor) -> Dropped:
        slot = Dropped(tensor)
        if self._recorder is not None:
            self._recorder.pack(tensor)
            self._slots.append(slot)
        return slot

    def close(self) -> list[ReferenceType[Dropped]]:
        """Hold nothing any more, and see which slots somebody else holds. All stay kept until further notice."""
        for slot in self._slots:
            slot.keep()
        slots = [ref(slot) for slot in self._slots]
        self._recorder, self._slots = None, []
        return slots


def _record(state: LayerState, key: Key, call: Call) -> Any:
    recorder = Recorder()
    hook = _Slots(recorder)
    for name, parameter in (*state.layer.named_parameters(), *state.layer.named_buffers()):
        recorder.parameter(name, parameter)
    for position, tensor in enumerate(call.tensors):
        recorder.argument(position, tensor)
    try:
        followed = recorder.path.follow(state.layer, recorder.seen)
        with followed, saved_tensors_hooks(hook.pack, unpack), recorder.calls, recorder:
            result = call.run()
        recording = recorder.finish(result)
    finally:
        slots = [slot() for slot in hook.close()]
    for slot, saved in zip(slots, recording.saved, strict=True):
        saved.alive = slot is not None
    plan, cells = _proved_plan(recording, state)
    pairs = [(slot, save) for slot, save in zip(slots, plan.saves, strict=False) if slot is not None]
    let_go(plan, pairs, cells)
    recording.release()
    state.last = plan
    state.served["recorded"] += 1
    state.given = {}
    _note_held(state, plan, call, result)
    state.remember(key, plan)
    fake = any(map(_is_fake, call.tensors))
    if not recording.reads_data and not any(map(is_unequal, (step.func for step in recording.steps))):
        state.share(key, plan, fake=fake)
    if fake or any(map(_is_fake, tensors(result))):
        state.unproved.add(key)
    return result


def _proved_plan(recording: Recording, state: LayerState) -> tuple[LayerPlan, list[Cell]]:
    """A plan that has been tried on the recorded forward, and what that forward keeps to start from."""
    while True:
        plan = make_plan(recording, state.policy, mp_comm=state.mp_comm)
        cells = _cells(recording, plan)
        different = first_difference(recording, plan, cells)
        if different is None:
            return plan, cells
        recording.steps[different].once = True


def _cells(recording: Recording, plan: LayerPlan) -> list[Cell]:
    """What the recorded forward itself keeps to start from."""
    cells: list[Cell] = []
    for leaf in plan.program.leaves:
        cells.append(Cell())
        cells[-1].fill(recording.taken(leaf.value, leaf.source))
    for draw in plan.program.draws:
        cells.append(Cell())
        cells[-1].fill(recording.state_before(draw.step))
    return cells
