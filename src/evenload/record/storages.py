"""Storages that are alive, and where each stands in the log.

The truth is the storage, not the tensor: views and aliases share one, in-place operators make none, and it is gone when
PyTorch drops it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, cast

import torch

from evenload.ledger.cells import DEVICE_SHIFT, FREED, HALF, LAST_USED, NAMES, SOURCE_AND_ROLES, UPPER
from evenload.ledger.ledger import ALIVE
from evenload.ledger.log import Log, head
from evenload.ledger.words import Phase, Role
from evenload.record._torch_private import address
from evenload.record.devices import NOBODY, Devices
from evenload.record.entry import WHOLE, Entry
from evenload.record.operators import Traits
from evenload.record.tensors import arguments, components, flat, is_wrapper
from evenload.record.where import Where

_FORWARD: Final = Phase.FORWARD.code
_BACKWARD: Final = Phase.BACKWARD.code
_RECOMPUTE: Final = Phase.RECOMPUTE.code
_OTHER: Final = Phase.OTHER.code
_BETWEEN: Final = frozenset((Phase.OTHER.code, Phase.OPTIMIZER.code))
_OUTSIDE: Final = head(phase=Phase.OTHER.code, device=0)
_LASTING: Final = Role.PARAMETER | Role.GRADIENT | Role.OPTIMIZER | Role.COLLECTIVE | Role.BUFFER
"""Roles that a storage keeps when it is resized."""


class Storages:
    """Follows storages from operator to operator.

    `clock` is the index of the next event. Frees arrive at any moment, in any thread, out of Python's own garbage
    collector: they are queued, and take their place in the order of events when `settle` is called.
    """

    def __init__(
        self, log: Log, where: Where, *, fake: bool = False, devices: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Follow storages.

        Args:
            log: where events go.
            where: labels of what is made now.
            fake: follow fake and meta tensors (a dry run); otherwise they are no memory and left alone.
            devices: names that devices get in the ledger instead of their own.
        """
        self.clock = 1
        self.late = False
        """Whether a storage that nobody saw being made must be new: so from the second step on."""
        self.host_apart = False
        """Whether what PyTorch makes on the host, numbers and random states, is not on the device."""
        self._log = log
        self._where = where
        self._fake = fake
        self._device = Devices(log, fake=fake, renamed=devices).code
        self._live: dict[int, Entry] = {}
        self._emptied: dict[int, Entry] = {}
        self._gone: deque[Entry] = deque()
        self._new: list[int] = []
        self._pins = False
        self._suspects: list[int] | None = None
        self._call_at = ALIVE
        self._call: Callable[[], None] | None = None
        self.waiting = 0
        """Above zero, unknown storages are the communication library's own, and left alone."""

    def settle(self) -> int:
        """Log the frees that have happened since, and return the clock."""
        gone = self._gone
        while gone:
            entry = gone.popleft()
            if self._live.get(entry.key) is entry:
                del self._live[entry.key]
                self._free(entry)
            elif self._emptied.get(entry.key) is entry:
                del self._emptied[entry.key]
        return self.clock

    @property
    def queued(self) -> int:
        """Storages that are gone and whose free has not been logged yet."""
        return len(self._gone)

    def collected(self, since: int) -> int:
        """Say that the garbage collector freed what has gone since that many were `queued`; returns the bytes."""
        entries = list(islice(self._gone, since, None))
        for entry in entries:
            entry.collected = True
        return sum(entry.nbytes for entry in entries)

    def living(self) -> list[Entry]:
        """Storages with memory."""
        self.settle()
        return list(self._live.values())

    def call_at(self, index: int, call: Callable[[], None]) -> None:
        """Call a function once, after the operator that ends at an event or later."""
        self._call_at, self._call = index, call

    def stop(self) -> None:
        """Follow nothing any more."""
        self.settle()
        self._live.clear()
        self._emptied.clear()

    def ran(self, traits: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Log what an operator that has just run made and used; its end is an event."""
        if self._gone:
            self.settle()
        names = traits.label | (self._where.module + 1)
        if self._where.module < 0 and self._where.phase in _BETWEEN:
            self._made_between(traits, args, kwargs, result)
        elif type(result) is torch.Tensor:
            self._made(result, names, foreign=traits.fresh, pinned=_pins(traits, kwargs))
        elif result is not None:
            for tensor in flat(result):
                self._made(tensor, names, foreign=traits.fresh, pinned=_pins(traits, kwargs))
        if not (traits.fresh and self._fake):  # what a fake number stands in for is the number itself
            self._used(traits, arguments(traits.tensors, args, kwargs))
        if traits.resizes or traits.writes:
            self._written(traits, args, kwargs, result)
        self._ended()

    def suspect(self) -> None:
        """What is made from here on may belong to a phase that has begun unseen."""
        if self._suspects is None:
            self._suspects = []

    def drop_suspects(self) -> None:
        """No phase had begun unseen."""
        self._suspects = None

    def confirm_suspects(self, phase: int, micro_batch: int) -> None:
        """A phase had begun: what was made since `suspect` belongs to it."""
        words = self._log.words
        for position in self._suspects or ():
            device = words[position] & 0xFF << DEVICE_SHIFT
            words[position] = head(phase=phase, device=0, micro_batch=micro_batch) | device
        self._suspects = None

    def appeared(self, tensor: torch.Tensor, label: int) -> None:
        """Log a tensor that PyTorch made without any operator, such as a copy of a random state.

        Args:
            tensor: the tensor.
            label: what made it, as the operator's half of word 4 of an allocation.
        """
        self.settle()
        self._made(tensor, label | (self._where.module + 1), host=self.host_apart)
        self._ended()

    def resized(self, storage: torch.UntypedStorage, label: int = 0) -> None:
        """Follow a storage whose size may have changed.

        PyTorch makes the new memory before it drops the old one.

        Args:
            storage: the storage, after the change.
            label: operator's half of word 4 of an allocation.
        """
        if self._gone:
            self.settle()
        key, nbytes = address(storage), storage.nbytes()
        entry = self._live.get(key) or self._emptied.get(key)
        if entry is None or nbytes == entry.nbytes:
            return
        old, had = entry.position, entry.nbytes
        if nbytes:
            words = self._log.words
            first = words[old] if old >= 0 else self._where.head
            device = first & 0xFF << DEVICE_SHIFT
            lasting = words[old + SOURCE_AND_ROLES] & _LASTING << UPPER if old >= 0 else 0
            entry.position = self._log.allocation(
                self._where.head | device,
                nbytes,
                self.clock,
                label | (self._where.module + 1),
                self._where.word7 | lasting,
            )
            self._new.append(entry.position)
            self.clock += 1
            if old >= 0:
                self._log.link(entry.position, old)
        if had:
            self._log.words[old + FREED] = self.clock
            self.clock += 1
        entry.nbytes, entry.parts = nbytes, None
        self._live.pop(key, None)
        self._emptied.pop(key, None)
        (self._live if nbytes else self._emptied)[key] = entry

    def mark(self, tensor: torch.Tensor, role: Role, module: int | None = None) -> None:
        """Say what a tensor's storage is, and which module it belongs to (a position in the strings)."""
        if self._gone:
            self.settle()
        for part in components(tensor):
            entry = self._live.get(address(part.untyped_storage())) or self._found(part)
            if entry is None:
                continue
            words = self._log.words
            words[entry.position + SOURCE_AND_ROLES] |= role.value << UPPER
            if module is not None:
                names = entry.position + NAMES
                words[names] = words[names] & ~HALF | (module + 1)
            entry.outside = False

    def note_parts(self, parts: Mapping[int, Mapping[int, int]]) -> None:
        """Say of living storages how much of them tensors still refer to, where that is less than the whole.

        Args:
            parts: key of the storage -> offset and bytes of the tensors.
        """
        self.settle()
        for key, held in parts.items():
            entry = self._live.get(key)
            if entry is not None and (reach := sum(held.values())) < entry.nbytes:
                self._log.reach(entry.position, reach)

    @property
    def pinned(self) -> int:
        """Page-locked bytes that are alive."""
        code = self._log.device("pinned") if self._pins else None
        words = self._log.words
        return sum(
            entry.nbytes for entry in self._live.values() if words[entry.position] >> DEVICE_SHIFT & 0xFF == code
        )

    def _used(self, traits: Traits, tensors: list[torch.Tensor]) -> None:
        live, words, clock = self._live, self._log.words, self.clock
        backward = self._where.phase == _BACKWARD
        forward = self._where.phase == _FORWARD
        for tensor in tensors:
            try:
                entry = live.get(address(tensor.untyped_storage()))
            except NotImplementedError:  # sparse and opaque tensors
                self._used(traits, components(tensor))
                continue
            if entry is None:
                entry = self._found(tensor, fresh=traits.fresh)
                if entry is None:
                    continue
                words, clock = self._log.words, self.clock
            words[entry.position + LAST_USED] = clock
            if backward:
                if entry.parts is not WHOLE:
                    entry.read(tensor)
            elif forward and entry.outside:
                words[entry.position + SOURCE_AND_ROLES] |= Role.INPUT.value << UPPER
                entry.outside = False

    def _ended(self) -> None:
        """The end of an operator: what it made has been used up to here."""
        if self._new:
            words = self._log.words
            for position in self._new:
                words[position + LAST_USED] = self.clock
            self._new.clear()
        self.clock += 1
        if self.clock > self._call_at and self._call is not None:
            self._call_at, call, self._call = ALIVE, self._call, None
            call()

    def _made(
        self, tensor: torch.Tensor, names: int, *, foreign: bool = False, pinned: bool = False, host: bool = False
    ) -> None:
        """Log a result; `foreign`: its memory may be another library's; `host`: it is the host's whatever it says."""
        try:
            storage = None if is_wrapper(type(tensor)) else tensor.untyped_storage()
        except NotImplementedError:  # sparse and opaque tensors
            storage = None
        if storage is None:
            for part in components(tensor):
                self._made(part, names, foreign=foreign, pinned=pinned)
            return
        key = address(storage)
        if key in self._live or key in self._emptied:
            return
        device = self._device(tensor)
        if device == NOBODY:
            return
        if foreign and not self._fake and not storage.resizable():
            device = self._log.device("foreign")
        elif host or (foreign and self.host_apart and not tensor.dim()):
            device = self._log.device("cpu")
        elif pinned:
            self._pins = True
            device = self._log.device("pinned")
        entry = self._enter(storage, key)
        if not entry.nbytes:
            return
        where = self._where
        entry.outside = where.phase == _OTHER
        entry.position = self._log.allocation(
            where.head | device << DEVICE_SHIFT, entry.nbytes, self.clock, names, where.word7
        )
        self._new.append(entry.position)
        self.clock += 1
        if self._suspects is not None and entry.outside:
            self._suspects.append(entry.position)

    def _made_between(self, traits: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Log results made outside modules: they belong to the module whose memory they are made from, if to one.

        Of an operator over lists (foreach), every result belongs to the entry of the list that it is made from.
        """
        made = flat(result)
        listed = flat(cast("object", args[0])) if args and isinstance(args[0], (list, tuple)) else list[torch.Tensor]()
        if len(listed) == len(made) > 1:
            owners = [self._owner(tensor) for tensor in listed]
        else:
            known = {self._owner(tensor) for tensor in arguments(traits.tensors, args, kwargs)}
            owners = [known.pop() if len(known) == 1 else 0] * len(made)
        for tensor, owner in zip(made, owners, strict=True):
            self._made(tensor, traits.label | owner, foreign=traits.fresh, pinned=_pins(traits, kwargs))

    def module_of(self, tensor: torch.Tensor) -> int:
        """Module that a tensor's storage belongs to, as a position in the strings; -1: to none."""
        return self._owner(tensor) - 1

    def _owner(self, tensor: torch.Tensor) -> int:
        """Module that a tensor's storage belongs to, as the module's half of word 4; 0: to none."""
        try:
            entry = self._live.get(address(tensor.untyped_storage()))
        except NotImplementedError:  # sparse and opaque tensors
            return 0
        return 0 if entry is None or entry.position < 0 else self._log.words[entry.position + NAMES] & HALF

    def _found(self, tensor: torch.Tensor, *, fresh: bool = False) -> Entry | None:
        """A storage that no operator was seen to make: older than the recording, or made in another thread."""
        storage = tensor.untyped_storage()
        key = address(storage)
        if key in self._emptied:
            self.resized(storage)
            return self._live.get(key)
        device = self._device(tensor)
        if device == NOBODY or self.waiting:
            return None
        foreign = not self._fake and not storage.resizable()
        entry = self._enter(storage, key)
        if not entry.nbytes:
            return None
        first = _OUTSIDE | (self._log.device("foreign") if foreign else device) << DEVICE_SHIFT
        if fresh or foreign or self.late:
            entry.position = self._log.allocation(first, entry.nbytes, self.clock, 0, 0)
            self.clock += 1
        else:
            entry.position = self._log.allocation(first, entry.nbytes, 0, 0, Role.BEFORE.value << UPPER)
        return entry

    def _enter(self, storage: torch.UntypedStorage, key: int) -> Entry:
        entry = Entry(storage, self._gone.append)
        entry.key, entry.nbytes, entry.position, entry.outside, entry.parts = key, storage.nbytes(), -1, True, None
        entry.collected = False
        (self._live if entry.nbytes else self._emptied)[key] = entry
        return entry

    def _free(self, entry: Entry) -> None:
        self._log.words[entry.position + FREED] = self.clock
        self.clock += 1
        if entry.collected:
            self._log.words[entry.position + SOURCE_AND_ROLES] |= Role.COLLECTED.value << UPPER
        if entry.parts and (read := sum(entry.parts.values())) < entry.nbytes:
            self._log.reach(entry.position, read)

    def _written(self, traits: Traits, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if traits.resizes:
            for tensor in flat((args[:1], kwargs.get("out"))):
                for part in components(tensor):
                    self.resized(part.untyped_storage(), traits.label)
        if traits.writes:
            # What forward communicates may be kept as an activation; what later collectives write is none.
            forward = self._where.phase in (_FORWARD, _RECOMPUTE)
            role = traits.writes if forward else Role.BUFFER
            for tensor in flat((args[:1] if traits.writes_first else None, kwargs.get("out"), result)):
                self.mark(tensor, role)


def _pins(traits: Traits, kwargs: Mapping[str, Any]) -> bool:
    return traits.pins or bool(kwargs and kwargs.get("pin_memory"))
