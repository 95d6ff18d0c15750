"""Which device of a ledger the memory of a tensor is on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from evenload.ledger.log import Log
from evenload.record._torch_private import FakeTensor

NOBODY: Final = -1
"""Device of tensors that are no memory."""


class Devices:
    """Codes of devices in a log."""

    def __init__(self, log: Log, *, fake: bool, renamed: Mapping[str, str]) -> None:
        """Give devices codes.

        Args:
            log: whose codes they are.
            fake: whether fake and meta tensors stand for memory.
            renamed: names that devices get instead of their own.
        """
        self._log = log
        self._fake = fake
        self._renamed = renamed
        self._codes: dict[torch.device, int] = {}

    def code(self, tensor: torch.Tensor) -> int:
        """Code of the device that a tensor's memory is on; `NOBODY` for a tensor that is no memory."""
        device = tensor.device
        code = self._codes.get(device)
        if code is None:
            name = "cpu" if device.type == "cpu" else str(device)
            code = self._codes[device] = (
                NOBODY if device.type == "meta" and not self._fake else self._log.device(self._renamed.get(name, name))
            )
        if not self._fake and type(tensor) is FakeTensor:
            return NOBODY
        return code
