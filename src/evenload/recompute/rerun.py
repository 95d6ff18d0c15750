"""Runs programs in backward, each operator once.

What is computed is remembered until every tensor that autograd saved on it was asked for once, or the backward is over:
so an operator runs once in a backward, however many tensors were saved on its result, and nothing stays behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any, Final, cast

import torch

from evenload.recompute._torch_private import NO_TASK, at_end_of_backward, graph_task, wait
from evenload.recompute.aten import generator_state, set_generator_state
from evenload.recompute.errors import changed_result, missing_result
from evenload.recompute.geometry import Ref, matches, view, whole_copy
from evenload.recompute.program import Blank, Call, Cell, Program
from evenload.recompute.wrappers import tensors


class Memory:
    """What one forward's program has computed in the backwards that run now."""

    __slots__ = ("_lock", "_tasks")

    def __init__(self) -> None:
        self._lock = RLock()  # a layer on several devices has a backward thread for each
        self._tasks: dict[int, _Task] = {}

    def value(self, program: Program, cells: Sequence[Cell], value: int) -> torch.Tensor:
        """The anchor of a dropped value.

        Args:
            program: how to compute it.
            cells: what the value's recipe starts from.
            value: number of the value.

        Raises:
            StaleTensorError: something it starts from was changed since it was kept.
        """
        number = graph_task()
        with self._lock:
            task = self._tasks.get(number) if number != NO_TASK else _Task()
            if task is None:
                task = self._tasks[number] = _Task()
                at_end_of_backward(lambda: self._forget(number))
            task.asked[value] += 1
            found = task.values.get(value)
            if found is None:
                found = _run(program, cells, value, task)
            if not task.wants(program, value):
                task.values.pop(value, None)
            return found

    def _forget(self, number: int) -> None:
        with self._lock:
            self._tasks.pop(number, None)


class _Task:
    """One backward."""

    __slots__ = ("asked", "values")

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        self.asked: Counter[int] = Counter()
        """Dropped value -> how many of the tensors saved on it were asked for."""

    def wants(self, program: Program, value: int) -> bool:
        """Whether some saved tensor on a value will still be asked for."""
        return self.asked[value] < program.saves.get(value, 0)


def _run(program: Program, cells: Sequence[Cell], value: int, task: _Task) -> torch.Tensor:
    recipe = program.recipes[value]
    calls = _missing(recipe.calls, value, task.values)
    needed = {one for call in calls for one in call.needs}
    bases: dict[int, torch.Tensor] = dict(task.values)
    bases.update((leaf.value, cells[at].anchor(leaf)) for at, leaf in recipe.leaves if leaf.value in needed)
    states = {draw.step: cells[at] for at, draw in recipe.draws}
    left = Counter(one for call in calls for one in call.needs)
    left[value] += 1
    lasting = set(bases)
    with quiet():
        for call in calls:
            left.subtract(call.needs)
            over = {one for one in call.needs if not left[one] and one not in lasting}
            state = states[call.step].tensor(call.label) if call.generator is not None else None
            bases.update(perform(call, bases, state, over))
            for made in call.makes:
                if task.wants(program, made):
                    task.values[made] = bases[made]
                    lasting.add(made)
            for one in over:
                bases.pop(one, None)
    return bases[value]


def _missing(sequence: Sequence[Call], value: int, there: Mapping[int, torch.Tensor]) -> list[Call]:
    """The calls of a recipe that must run, given what is there already."""
    wanted = {value}
    chosen: list[Call] = []
    for call in reversed(sequence):
        if wanted.intersection(call.makes):
            chosen.append(call)
            wanted.update(needed for needed in call.needs if needed not in there)
    chosen.reverse()
    return chosen


def perform(
    call: Call, bases: Mapping[int, torch.Tensor], state: torch.Tensor | None, over: set[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Run one operator; the values that it makes.

    Args:
        call: the operator.
        bases: anchors of the values that it needs.
        state: the generator as it was in forward, where the call draws.
        over: values that nobody needs afterwards: what the call writes to is copied first, unless it is one of these.
    """
    given = bases
    if call.writes:
        own = {one: bases[one] if one in over else whole_copy(bases[one]) for one, _ in call.writes}
        given = {**bases, **own}
    args = [_filled(one, given) for one in call.args]
    kwargs = {name: _filled(one, given) for name, one in call.kwargs.items()}
    returned = list(tensors(_with_state(call, args, kwargs, state)))
    for before, after in call.writes:
        yield after, given[before]
    for number, value, expected in call.results:
        if number >= len(returned):
            raise missing_result(call.label)
        made = returned[number]
        if not matches(made, expected.size, expected.stride, expected.dtype):
            raise changed_result(call.label, expected, made)
        yield value, wait(made) if call.collective else made


def _with_state(call: Call, args: list[Any], kwargs: dict[str, Any], state: torch.Tensor | None) -> Any:
    """Run one operator, with the generator as it was in forward."""
    if call.generator is None or state is None:
        return call.func(*args, **kwargs)
    now = generator_state(call.generator)
    set_generator_state(call.generator, state)
    try:
        return call.func(*args, **kwargs)
    finally:
        set_generator_state(call.generator, now)


def _filled(argument: Any, bases: Mapping[int, torch.Tensor]) -> Any:
    """An argument with the tensors back in."""
    if isinstance(argument, Ref):
        return view(bases[argument.value], argument.size, argument.stride, argument.distance, argument.dtype)
    if isinstance(argument, Blank):
        return torch.empty_strided(argument.size, argument.stride, dtype=argument.dtype, device=argument.device)
    if isinstance(argument, list):
        return [_filled(one, bases) for one in cast("list[Any]", argument)]
    return argument


def _devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


_DEVICES: Final = _devices()


@contextmanager
def quiet() -> Generator[None]:
    """No autograd, and no autocast: operators get their arguments as the kernels got them in forward."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in _DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
