"""Small ledgers written by hand, and random ones, for the tests of the room."""

import numpy as np

from evenload.ledger.ledger import ALIVE, Allocations, Frame, HostLine, Ledger, Mark, Metadata, Owner
from evenload.ledger.words import Category, Hold, MarkKind, Phase, Role

FORWARD, BACKWARD, OTHER = (phase.code for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OTHER))


def allocations(*rows, **columns):
    """Allocations from (nbytes, allocated, last_used, freed), the other columns at their neutral value."""
    count = len(rows)
    table = np.array(rows, dtype=np.int64).reshape(count, 4)
    neutral = {
        "time": np.zeros(count, np.int64),
        "phase": np.zeros(count, np.uint8),
        "category": np.zeros(count, np.uint8),
        "roles": np.zeros(count, np.uint16),
        "device": np.zeros(count, np.uint8),
        "micro_batch": np.full(count, -1, np.int32),
        "module": np.full(count, -1, np.int32),
        "operator": np.full(count, -1, np.int32),
        "source": np.full(count, -1, np.int32),
        "previous": np.full(count, -1, np.int64),
        "reach": np.full(count, -1, np.int64),
        "made": np.full(count, -1, np.int64),
    }
    given = {name: np.array(values, dtype=neutral[name].dtype) for name, values in columns.items()}
    return Allocations(
        nbytes=table[:, 0], allocated=table[:, 1], last_used=table[:, 2], freed=table[:, 3], **(neutral | given)
    )


def step():
    """One step of a model with one layer: a weight, a batch, an activation, a temporary, a gradient, a pinned batch."""
    return Ledger(
        metadata=Metadata(evenload="1.2.3", torch="2.13.0", rank=3, world=8, command=("train.py", "--lr", "ü")),
        allocations=allocations(
            (100, 0, 14, ALIVE),
            (10, 1, 15, 16),
            (40, 4, 12, 13),
            (30, 5, 7, 8),
            (100, 11, 14, ALIVE),
            (999, 17, 18, ALIVE),
            time=[0, 5, 10, 11, 20, 30],
            phase=[OTHER, OTHER, FORWARD, FORWARD, BACKWARD, OTHER],
            category=[
                category.code
                for category in (
                    Category.PARAMETER,
                    Category.INPUT,
                    Category.ACTIVATION,
                    Category.TEMPORARY,
                    Category.GRADIENT,
                    Category.TEMPORARY,
                )
            ],
            roles=[Role.PARAMETER | Role.BEFORE, Role.INPUT, 0, 0, Role.GRADIENT, 0],
            device=[0, 0, 0, 0, 0, 1],
            micro_batch=[-1, -1, 0, 0, 0, -1],
            module=[1, -1, 1, 1, 1, -1],
            operator=[-1, 2, 3, 3, 3, 2],
            source=[-1, -1, 1, 1, 1, 0],
            reach=[-1, 2, -1, -1, -1, -1],
            made=[-1, -1, -1, 6, -1, -1],
        ),
        end=20,
        strings=(
            *("cuda:0", "layers.0", "aten.empty", "aten.mm", "train.py:3 main", "train.py:9 forward", "pinned"),
            *("history[0]", "train.py:3", "nothing that Python can reach"),
        ),
        devices=("cuda:0", "pinned"),
        frames=(Frame(location="train.py:3 main", caller=-1), Frame(location="train.py:9 forward", caller=0)),
        marks=(
            Mark(kind=MarkKind.STEP, index=1, time=4),
            Mark(kind=MarkKind.PHASE, index=4, time=9, value=FORWARD, micro_batch=0),
            Mark(kind=MarkKind.PHASE, index=9, time=15, value=BACKWARD, micro_batch=0),
            Mark(kind=MarkKind.NOTE, index=19, time=40, text="layers.0"),
        ),
        host=(HostLine(step=0, index=19, time=39, resident=5000, pinned=999, reserved=512),),
        owners=(
            Owner(row=4, hold=Hold.RETAINED, chain="history[0]", source="train.py:3"),
            Owner(row=5, hold=Hold.UNREACHABLE, chain="nothing that Python can reach"),
        ),
    )


def random_rows(rng, count):
    """`count` allocations with consistent lives, every column filled."""
    index = np.sort(rng.choice(np.arange(1, 4 * count), count, replace=False)).astype(np.int64)
    life = rng.integers(1, 2 * count, count)
    alive = rng.random(count) < 0.1
    return Allocations(
        nbytes=rng.integers(0, 2**40, count),
        allocated=index,
        last_used=index + life - 1,
        freed=np.where(alive, ALIVE, index + life),
        time=index * 1000,
        phase=rng.integers(0, len(Phase), count).astype(np.uint8),
        category=rng.integers(0, len(Category), count).astype(np.uint8),
        roles=rng.integers(0, 256, count).astype(np.uint16),
        device=rng.integers(0, 2, count).astype(np.uint8),
        micro_batch=rng.integers(-1, 8, count).astype(np.int32),
        module=rng.integers(-1, 7, count).astype(np.int32),
        operator=rng.integers(-1, 7, count).astype(np.int32),
        source=rng.integers(-1, 2, count).astype(np.int32),
        previous=np.full(count, -1, np.int64),
        reach=np.full(count, -1, np.int64),
        made=np.where(rng.random(count) < 0.1, index + 1, -1),
    )
