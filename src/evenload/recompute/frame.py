"""One forward of one layer under saved-tensor hooks: what autograd gets to hold, and what it gets back.

Autograd holds a `Kept` or a `Dropped` for every tensor that it saves. Until the layer returns, a `Dropped` still holds
its tensor: only when the forward has turned out to be like the recorded one, are the tensors let go. So a forward that
goes another way keeps everything, and is never computed again by a plan that was made for something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch

from evenload.recompute._torch_private import kind_of, version
from evenload.recompute.errors import changed_since
from evenload.recompute.geometry import Ref, equal_bits, is_plain, matches, same_layout, view
from evenload.recompute.layer_plan import Drop, LayerPlan, Save
from evenload.recompute.program import Cell, Program
from evenload.recompute.rerun import Memory
from evenload.recompute.wrappers import Wrapping, tensors, unwrap, wrap


class Kept(NamedTuple):
    """A tensor that stays, as it was saved."""

    tensor: torch.Tensor
    version: int
    label: str


class Again(NamedTuple):
    """How a tensor that was let go is made again."""

    at: Ref
    wrappings: tuple[Wrapping, ...]
    program: Program
    cells: tuple[Cell, ...]
    memory: Memory


class Dropped:
    """A tensor that is computed again when backward asks for it, once its layer has returned."""

    __slots__ = ("__weakref__", "inside")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.inside: Kept | Again = Kept(tensor, version(tensor), "a tensor")

    def keep(self, label: str | None = None) -> None:
        """Stay after all."""
        if isinstance(self.inside, Kept):
            tensor, number, before = self.inside
            self.inside = Kept(_detached(tensor), number, label or before)


def unpack(packed: Kept | Dropped) -> torch.Tensor:
    """Saved-tensor hook: called when backward needs a tensor.

    Raises:
        StaleTensorError: it was changed in place since it was saved. Torch itself does not look under saved-tensor
            hooks.
    """
    held = packed.inside if isinstance(packed, Dropped) else packed
    if isinstance(held, Kept):
        tensor = held.tensor
        if version(tensor) != held.version:
            raise changed_since(held.label, held.version, version(tensor))
        return tensor
    return computed(held)


def computed(again: Again) -> torch.Tensor:
    """A tensor that was let go."""
    at = again.at
    base = again.memory.value(again.program, again.cells, at.value)
    return wrap(view(base, at.size, at.stride, at.distance, at.dtype), again.wrappings)


class Frame:
    """Follows one forward of a layer by its plan."""

    def __init__(self, plan: LayerPlan) -> None:
        self.plan: Final = plan
        program = plan.program
        self.cells = [Cell() for _ in range(len(program.leaves) + len(program.draws))]
        self.mismatch: str | None = None
        """Where this forward went another way than the recorded one."""
        self.shown: Callable[[torch.Tensor, int], bool] | None = None
        """Tells whether a tensor shows a value, where a dispatch mode follows as well."""
        self._saves: Final = plan.saves
        self._at = 0
        self._dropped: list[tuple[Dropped, Save]] = []
        self._seen: Counter[tuple[str, str]] = Counter()

    def start(self, layer: torch.nn.Module, arguments: list[torch.Tensor]) -> None:
        """Take the leaves that are there before the layer runs."""
        for leaf, position in self.plan.from_arguments:
            self.take(leaf, arguments[position])
        for leaf, name in self.plan.from_parameters:
            self.take(leaf, attribute(layer, name))

    def pack(self, tensor: torch.Tensor) -> Kept | Dropped:
        """Saved-tensor hook: called for every tensor that autograd saves."""
        at = self._at
        self._at = at + 1
        if at >= len(self._saves):
            if not self.plan.open_end:
                self.differs("it saves more tensors")
            return Kept(_detached(tensor), version(tensor), "a tensor")
        save = self._saves[at]
        kind = type(tensor)
        if kind is not save.kind and kind_of(tensor) is not save.kind:
            return self._unexpected(tensor, _difference(at, save, tensor))
        if tensor.shape != save.size or tensor.dtype is not save.dtype:
            return self._unexpected(tensor, _difference(at, save, tensor))
        if save.stride is not None and not (
            tensor.layout is torch.strided and same_layout(save.size, tensor.stride(), save.stride)
        ):
            return self._unexpected(tensor, _difference(at, save, tensor))
        if self.shown is not None and save.at is not None and not self._shows(tensor, save.at):
            return self._unexpected(tensor, f"saved tensor {at} ({save.label}) is another tensor")
        if save.drop is None:
            kept = Kept(_detached(tensor), version(tensor), save.label)
            for leaf in save.fills:
                self.take(leaf, tensor)
            return kept
        dropped = Dropped(tensor)
        self._dropped.append((dropped, save))
        return dropped

    def _shows(self, tensor: torch.Tensor, value: int) -> bool:
        plain = unwrap(tensor)[0]
        return plain is not None and is_plain(plain) and self.shown is not None and self.shown(plain, value)

    def seen(self, path: str, end: str, tree: Any) -> None:
        """Take the leaves that enter or leave a module."""
        call = self._seen[path, end]
        self._seen[path, end] += 1
        rows = [row for row in self.plan.from_modules.get((path, end), ()) if row[1] == call]
        if rows:
            found = list(tensors(tree))
            for leaf, _, position in rows:
                if position < len(found):
                    self.take(leaf, found[position])

    def take(self, leaf: int, tensor: torch.Tensor) -> None:
        """Keep a tensor as a leaf."""
        plain = tensor if type(tensor) is torch.Tensor else unwrap(tensor)[0]
        expected = self.plan.program.leaves[leaf].captured
        if plain is None or not matches(plain, expected.size, expected.stride, expected.dtype):
            self.differs(f"{self.plan.program.leaves[leaf].label} has another shape or type")
        else:
            self.cells[leaf].fill(plain)

    def differs(self, how: str) -> None:
        """Note that this forward is not like the recorded one."""
        self.mismatch = self.mismatch or how

    def prove(self) -> bool:
        """Compute what is to be dropped again, while it is still there: what comes out otherwise must stay.

        Returns:
            Whether it was tried, or cannot be.
        """
        program, memory = self.plan.program, Memory()
        if self.mismatch is not None or any(call.collective for call in program.calls):
            return True
        if not all(cell.readable for cell in self.cells):
            return False
        for dropped, save in self._dropped:
            if save.drop is not None and isinstance(dropped.inside, Kept):
                again = _again(save.drop, program, self.cells, memory)
                if not _comes_out(again, dropped.inside.tensor):
                    self.differs(f"{save.label} comes out otherwise when it is computed again")
                    break
        return True

    def finish(self) -> None:
        """Let go of what is dropped, if the layer did what it did when it was recorded."""
        if self._at < len(self._saves):
            self.differs(f"it saves {self._at} tensors instead of {len(self._saves)}")
        if not all(cell.filled for cell in self.cells):
            self.differs("a value that recomputation starts from did not come by")
        if self.mismatch is None:
            let_go(self.plan, self._dropped, self.cells)
        self.close()

    def close(self) -> None:
        """Hold nothing any more, for autograd holds on to `pack`; what was not let go of stays kept."""
        for dropped, save in self._dropped:
            dropped.keep(save.label)
        self._dropped, self.cells, self.shown = [], [], None

    def _unexpected(self, tensor: torch.Tensor, how: str) -> Kept:
        self.differs(how)
        return Kept(_detached(tensor), version(tensor), "a tensor")


def _comes_out(again: Again, as_saved: torch.Tensor) -> bool:
    """Whether a value can be computed again, and is what was saved."""
    try:
        return equal_bits(computed(again), as_saved)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001  # whatever an operator may say against running without autograd
        return False


def let_go(plan: LayerPlan, dropped: Iterable[tuple[Dropped, Save]], cells: list[Cell]) -> None:
    """From now on compute what is dropped again."""
    program = plan.program
    memory = Memory()
    for one, save in dropped:
        if save.drop is None:
            one.keep(save.label)
        else:
            one.inside = _again(save.drop, program, cells, memory)


def _again(drop: Drop, program: Program, cells: Sequence[Cell], memory: Memory) -> Again:
    mine = tuple([cells[number] for number in program.recipes[drop.at.value].cells])
    return Again(drop.at, drop.wrappings, program, mine, memory)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that does not hold the graph which holds it. A leaf of the graph holds none."""
    return tensor if tensor.is_leaf else tensor.detach()


def _difference(at: int, save: Save, tensor: torch.Tensor) -> str:
    was = f"{save.size} {save.dtype}"
    return f"saved tensor {at} ({save.label}) is {tuple(tensor.shape)} {tensor.dtype} where it was {was}"


def attribute(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer by its dotted name."""
    owner, _, last = name.rpartition(".")
    return getattr(layer.get_submodule(owner), last)
