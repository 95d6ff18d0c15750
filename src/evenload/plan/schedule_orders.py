"""In which order every rank runs its actions: one function a schedule.

All of them but GPipe have one form: `warmup` forwards, then forward and backward in turn, then the backwards left over.
They differ in the order of the forwards and in the length of the warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence

from evenload.plan.schedule_actions import Action, ActionList, Op


def gpipe(pp: int, interleave: int, micro_batches: int) -> ActionList:
    """All forwards, then all backwards. Source: Huang et al., arXiv 1811.06965, figure 2c."""
    rounds = (micro_batches,)
    forwards, backwards = _forwards(interleave, rounds), _backwards(interleave, rounds)
    return tuple((*forwards, *backwards) for _ in range(pp))


def one_f_one_b(pp: int, interleave: int, micro_batches: int) -> ActionList:
    """Rank r starts `pp - 1 - r` forwards ahead. Source: Narayanan et al., arXiv 2104.04473, section 2.2.1."""
    return _one_f_one_b(pp, interleave, (micro_batches,), hop=1)


def interleaved(pp: int, interleave: int, micro_batches: int) -> ActionList:
    """Interleaved 1F1B in PyTorch's order. Source: arXiv 2104.04473, section 2.2.2, and `ScheduleInterleaved1F1B`."""
    return _one_f_one_b(pp, interleave, rounds_even(pp, micro_batches), hop=2)


def interleaved_remainder_first(pp: int, interleave: int, micro_batches: int) -> ActionList:
    """Interleaved 1F1B in MindSpore's order. Source: MindSpore toolkits, `vpp`."""
    return _one_f_one_b(pp, interleave, rounds_remainder_first(pp, micro_batches), hop=2)


def interleaved_less_memory(pp: int, interleave: int, micro_batches: int) -> ActionList:
    """Interleaved 1F1B with a warm-up as short as that of plain 1F1B: fewer micro-batches in flight, more waiting.

    Source: MindSpore toolkits, `vpp2`.
    """
    return _one_f_one_b(pp, interleave, rounds_remainder_first(pp, micro_batches), hop=1)


def rounds_even(pp: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches that pass a chunk together, round by round: PyTorch's rule, `max(1, m // pp)` equal rounds.

    Where they cannot be equal, which PyTorch refuses, the first round takes the remainder.
    """
    rounds = max(1, micro_batches // pp)
    if micro_batches % rounds:
        return rounds_remainder_first(pp, micro_batches)
    return (micro_batches // rounds,) * rounds


def rounds_remainder_first(pp: int, micro_batches: int) -> tuple[int, ...]:
    """Rounds of `pp` micro-batches, the first one longer by what is left over (MindSpore's rule)."""
    rounds = max(1, micro_batches // pp)
    return (micro_batches - (rounds - 1) * pp, *[pp] * (rounds - 1))


def _one_f_one_b(pp: int, interleave: int, rounds: Sequence[int], *, hop: int) -> ActionList:
    """The common form. The last rank must have the first round of all its other chunks done before its first backward.

    Args:
        pp: pipeline stages.
        interleave: chunks per stage.
        rounds: micro-batches that pass a chunk together, first round longest.
        hop: forwards by which a rank starts earlier than the rank after it.
    """
    forwards, backwards = _forwards(interleave, rounds), _backwards(interleave, rounds)
    ahead = (interleave - 1) * rounds[0]
    return tuple(_alternate(forwards, backwards, warmup=ahead + hop * (pp - 1 - rank)) for rank in range(pp))


def _alternate(forwards: list[Action], backwards: list[Action], *, warmup: int) -> tuple[Action, ...]:
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def _forwards(interleave: int, rounds: Sequence[int]) -> list[Action]:
    return _by_round(Op.FORWARD, range(interleave), rounds)


def _backwards(interleave: int, rounds: Sequence[int]) -> list[Action]:
    return _by_round(Op.BACKWARD, range(interleave - 1, -1, -1), rounds)


def _by_round(op: Op, chunks: Sequence[int], rounds: Sequence[int]) -> list[Action]:
    order: list[Action] = []
    first = 0
    for size in rounds:
        order.extend(Action(op, chunk, first + index) for chunk in chunks for index in range(size))
        first += size
    return order
