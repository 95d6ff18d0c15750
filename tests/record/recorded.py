"""Rows of a ledger by what it says of them, and what autograd itself saves."""

import numpy as np
import torch

import evenload


def where(ledger, *, category=None, phase=None, module=None, operator=None, mask=None):
    """Rows with the asked words."""
    rows = ledger.allocations
    keep = np.ones(len(rows), dtype=bool) if mask is None else mask
    if category is not None:
        keep = keep & (rows.category == category.code)
    if phase is not None:
        keep = keep & (rows.phase == phase.code)
    found = np.flatnonzero(keep).tolist()
    found = [row for row in found if module is None or ledger.module(row) == module]
    return [row for row in found if operator is None or ledger.operator(row) == operator]


def total(ledger, rows):
    return int(ledger.allocations.nbytes[rows].sum())


def storages(tensors):
    """Storages of tensors, each once, by identity."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


def saved_storages(run):
    """Storages that autograd saves in `run`, parameters included, and what `run` returns."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return storages(saved), result


def record_step(model, run, **options):
    with evenload.record(model=model, **options) as recording:
        run().backward()
    return recording.ledger
