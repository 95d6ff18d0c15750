"""Where the step is: what every allocation is labelled with."""

from __future__ import annotations

from evenload.ledger.cells import UPPER
from evenload.ledger.log import head
from evenload.ledger.words import Phase, Role


class Where:
    """Phase, module, micro-batch and Python line that hold now, ready to be written into cells."""

    def __init__(self) -> None:
        self.phase = Phase.OTHER.code
        self.micro_batch = -1
        self.module = -1
        """Position of the module's path in the strings; -1: outside modules."""
        self.frame = -1
        """Position of the innermost Python line in the frames; -1: not recorded."""
        self.graph = False
        """Whether the backward that runs is recorded for another one."""
        self.head = head(phase=self.phase, device=0)

    def move(self, phase: int, micro_batch: int) -> None:
        """Enter a phase or a micro-batch."""
        self.phase = phase
        self.micro_batch = micro_batch
        self.head = head(phase=phase, device=0, micro_batch=micro_batch)

    @property
    def word7(self) -> int:
        """Last word of an allocation made now: its Python line and first roles."""
        return (self.frame + 1) | (Role.GRAPH << UPPER if self.graph else 0)
