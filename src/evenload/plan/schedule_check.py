"""Is a list of actions a schedule: every action once, in an order that can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from evenload.errors import EvenloadError
from evenload.plan.schedule_actions import Action, ActionList, Op, dependency


def validate(actions: ActionList, *, pp: int, interleave: int, micro_batches: int) -> None:
    """Raise if a schedule is not complete or cannot run.

    Backward may be one action (`B`) or two (`I`, later `W`), for each micro-batch of each chunk.

    Args:
        actions: the actions of every rank, in order.
        pp: pipeline stages, one a rank.
        interleave: chunks per stage.
        micro_batches: micro-batches per step.

    Raises:
        EvenloadError: an action is missing, repeated, unknown, out of order, or waits for ever; rank and action named.
    """
    if len(actions) != pp:
        raise EvenloadError(f"the schedule has {len(actions)} ranks, the pipeline {pp} stages", where="$")
    for rank, order in enumerate(actions):
        _check_types(rank, order)
        _check_known(rank, order, interleave, micro_batches)
        _check_complete(rank, order, interleave, micro_batches)
        _check_order(rank, order)
    _check_runs(actions, pp, interleave)


def _check_types(rank: int, order: Iterable[object]) -> None:
    for index, action in enumerate(order):
        if not isinstance(action, Action) or action.op not in set(Op):
            raise EvenloadError(
                f"{action!r} is no action",
                where=f"$[{rank}][{index}]",
                fix="write Action(Op.FORWARD, chunk, micro_batch)",
            )


def _check_known(rank: int, order: tuple[Action, ...], interleave: int, micro_batches: int) -> None:
    for index, action in enumerate(order):
        if not 0 <= action.chunk < interleave or not 0 <= action.micro_batch < micro_batches:
            raise EvenloadError(
                f"rank {rank} runs {action}, but chunks go from 0 to {interleave - 1} "
                f"and micro-batches from 0 to {micro_batches - 1}",
                where=f"$[{rank}][{index}]",
            )


def _check_complete(rank: int, order: tuple[Action, ...], interleave: int, micro_batches: int) -> None:
    times = Counter(order)
    for action, count in times.items():
        if count > 1:
            raise EvenloadError(f"rank {rank} runs {action} {count} times", where=f"$[{rank}]")
    for chunk in range(interleave):
        for micro_batch in range(micro_batches):
            done = {op for op in Op if Action(op, chunk, micro_batch) in times}
            if done not in ({Op.FORWARD, Op.BACKWARD}, {Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}):
                raise _incomplete(rank, chunk, micro_batch, done)


def _incomplete(rank: int, chunk: int, micro_batch: int, done: set[Op]) -> EvenloadError:
    split = {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}
    if Op.BACKWARD in done and done & split:
        fact = f"rank {rank} runs both a whole and a split backward of micro-batch {micro_batch} of chunk {chunk}"
        return EvenloadError(fact, where=f"$[{rank}]", fix="use B, or I and W")
    wanted = {Op.FORWARD} | (split if done & split else {Op.BACKWARD})
    missing = next(op for op in Op if op in wanted - done)
    return EvenloadError(f"rank {rank} never runs {Action(missing, chunk, micro_batch)}", where=f"$[{rank}]")


def _check_order(rank: int, order: tuple[Action, ...]) -> None:
    place = {action: index for index, action in enumerate(order)}
    for index, action in enumerate(order):
        if action.op == Op.FORWARD:
            continue
        needed = Op.BACKWARD_INPUT if action.op == Op.BACKWARD_WEIGHT else Op.FORWARD
        before = action._replace(op=needed)
        if place[before] > index:
            raise EvenloadError(f"rank {rank} runs {action} before {before}", where=f"$[{rank}][{index}]")


def _check_runs(actions: ActionList, pp: int, interleave: int) -> None:
    """Run every rank as far as it gets, until all are done or all wait."""
    next_index = [0] * pp
    done: set[tuple[int, Action]] = set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(actions):
            while next_index[rank] < len(order):
                action = order[next_index[rank]]
                if not _ready(action, rank, done, pp, interleave):
                    break
                done.add((rank, action))
                next_index[rank] += 1
                moved = True
    for rank, order in enumerate(actions):
        if next_index[rank] < len(order):
            raise _deadlock(rank, order[next_index[rank]], next_index[rank], pp, interleave)


def _ready(action: Action, rank: int, done: set[tuple[int, Action]], pp: int, interleave: int) -> bool:
    needs = dependency(action, rank, pp=pp, interleave=interleave)
    if needs is None:
        return True
    return any((needs.rank, Action(op, needs.chunk, action.micro_batch)) in done for op in needs.ops)


def _deadlock(rank: int, action: Action, index: int, pp: int, interleave: int) -> EvenloadError:
    needs = dependency(action, rank, pp=pp, interleave=interleave)
    assert needs is not None  # noqa: S101  # an action without a dependency never waits
    awaited = Action(needs.ops[0], needs.chunk, action.micro_batch)
    return EvenloadError(
        f"deadlock: rank {rank} waits at {action} for {awaited} on rank {needs.rank}, which never comes",
        where=f"$[{rank}][{index}]",
        fix="reorder the actions so that every input is made before it is waited for",
    )
