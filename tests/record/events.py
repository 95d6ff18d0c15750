"""Ledgers as what they are for a reader of memory: signed bytes in the order of events."""

import numpy as np

from evenload.ledger.ledger import ALIVE


def signed_events(ledger, *, since=None):
    """Signed bytes on the followed device from the first step on, one entry an allocation or a free.

    What is freed at one point is freed in any order (a cleared table of casts, the locals of a function), so frees that
    follow each other are sorted.
    """
    rows, mask = ledger.allocations, ledger.on_device
    nbytes, freed = rows.nbytes[mask], rows.freed[mask]
    gone = freed != ALIVE
    index = np.concatenate([rows.allocated[mask], freed[gone]])
    change = np.concatenate([nbytes, -nbytes[gone]])
    order = np.argsort(index, kind="stable")
    begin = int(ledger.step_begins[0]) if since is None else since
    events, frees = [], []
    for value in change[order][index[order] >= begin].tolist():
        if value < 0:
            frees.append(value)
        else:
            events += [*sorted(frees), value]
            frees = []
    return np.array(events + sorted(frees))
