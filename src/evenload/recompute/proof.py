"""Runs what a plan would compute again once, next to the recorded results: only what comes out equal may be dropped.

So an operator that gives something else the second time, for whatever reason, is found before anything depends on it.
"""

from __future__ import annotations

from collections import Counter

import torch

from evenload.recompute.geometry import equal_bits
from evenload.recompute.layer_plan import LayerPlan
from evenload.recompute.program import Call, Cell
from evenload.recompute.rerun import perform, quiet
from evenload.recompute.values import Recording


def first_difference(recording: Recording, plan: LayerPlan, cells: list[Cell]) -> int | None:
    """The first step that gives something else when it runs again; None if all is equal to the bit.

    Collectives are not tried: other ranks may not be recording now.
    """
    program = plan.program
    if any(call.collective for call in program.calls) or not all(cell.readable for cell in cells):
        return None
    bases = {leaf.value: cell.anchor(leaf) for leaf, cell in zip(program.leaves, cells, strict=False)}
    states = dict(zip([draw.step for draw in program.draws], cells[len(program.leaves) :], strict=True))
    left = Counter(needed for call in program.calls for needed in call.needs)
    with quiet():
        for call in program.calls:
            state = states[call.step].tensor(call.label) if call.step in states else None
            try:
                results = dict(perform(call, bases, state, set()))
            except torch.OutOfMemoryError:
                raise
            except Exception:  # noqa: BLE001  # whatever an operator may say against running without autograd
                return call.step
            for value, made in results.items():
                recorded = recording.values[value].tensor
                if recorded is not None and not equal_bits(recorded, made):
                    return call.step
                bases[value] = made if recorded is None else recorded
            _forget(call, bases, left)
    return None


def _forget(call: Call, bases: dict[int, torch.Tensor], left: Counter[int]) -> None:
    left.subtract(call.needs)
    for needed in call.needs:
        if not left[needed]:
            bases.pop(needed, None)
