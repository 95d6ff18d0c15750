"""Who refers to what: from some storages up to the variables of the program.

Python's garbage collector knows which objects refer to which, and the backward graph says which of its nodes saved a
storage. Together they are walked upwards, level by level, until variables are reached: of running functions, modules
and classes. Nothing is unpacked and nothing is run.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from inspect import CO_NEWLOCALS
from itertools import islice
from operator import attrgetter
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

import torch

from evenload.record._torch_private import address, body, saved
from evenload.record.arrays import holders_of
from evenload.record.living import living_tensors

_running: Final[Callable[[], Mapping[int, FrameType]]] = attrgetter("_current_frames")(sys)
"""Innermost frame of every thread."""
DEEPEST: Final = 14
"""Levels that are walked up."""
WIDEST: Final = 400
"""Objects of one level that are followed: what more refer to is a type or a module, not an owner."""


_SNAPSHOT: Final = 3
"""References to a snapshot of local variables that nobody else has: the frame, the variable, the argument."""


def is_a(thing: Any, kinds: Any) -> bool:
    """Whether an object is of a class: `isinstance` would ask the object itself, which may lie or fail."""
    return issubclass(type(thing), kinds)


class Link(NamedTuple):
    """One object refers to another."""

    parent: int
    how: str | None
    """How, where the two objects do not say it themselves; None: look at them."""


class Root(NamedTuple):
    """A variable that keeps things alive."""

    kind: str
    """`variable`, `module` or `class`."""
    name: str
    place: Any
    """Code of the function, module, or class."""


class Referrers:
    """The part of the heap above some storages."""

    def __init__(self, storages: Iterable[int]) -> None:
        """Walk up from storages, given by their addresses."""
        self.objects: dict[int, Any] = {}
        """By identity; the walk holds them."""
        self.links: dict[int, list[Link]] = defaultdict(list)
        """Identity of an object, or the negative address of a storage -> what refers to it."""
        self.roots: dict[int, list[Root]] = {}
        """Variables that hold an object, that of the outermost function last: the others got it from there."""
        self._wanted = {-key for key in storages}
        self._graph: dict[int, list[Link]] = defaultdict(list)
        self._nodes: dict[int, Any] = {}
        self._locals, self._globals = _variables()
        tensors = self._tensors()
        self._read_graph(tensors)
        tensors.clear()
        self._climb({link.parent for key in self._wanted for link in self.links[key]})
        self._climb(self._arrays())

    def _tensors(self) -> list[torch.Tensor]:
        """All tensors; those on the storages are the first objects of the walk."""
        tensors = living_tensors()
        for tensor in tensors:
            try:
                key = -address(tensor.untyped_storage())
            except (NotImplementedError, RuntimeError):  # sparse, opaque, or without a storage
                continue
            if key in self._wanted:
                self.objects[id(tensor)] = tensor
                self.links[key].append(Link(id(tensor), ""))
        return tensors

    def _read_graph(self, tensors: list[torch.Tensor]) -> None:
        """Note for every node of all backward graphs what it saved, who comes before it, and whose history it is."""
        by_body = {body(tensor): id(tensor) for tensor in tensors}
        pending: deque[Any] = deque()
        nodes = self._nodes
        for tensor in tensors:
            if tensor.is_leaf and tensor.grad is not None:  # C++ holds it, where the collector does not look
                self._graph[id(tensor.grad)].append(Link(id(tensor), ".grad"))
                self.objects.setdefault(id(tensor), tensor)
            node = tensor.grad_fn
            if node is not None:
                self._graph[id(node)].append(Link(id(tensor), f"grad_fn {type(node).__name__}"))
                self.objects.setdefault(id(tensor), tensor)
                if id(node) not in nodes:
                    nodes[id(node)] = node
                    pending.append(node)
        while pending:
            node = pending.popleft()
            self._saved_by(node, by_body)
            for following, _ in node.next_functions:
                if following is None:
                    continue
                self._graph[id(following)].append(Link(id(node), f"node {type(following).__name__}"))
                if id(following) not in nodes:
                    nodes[id(following)] = following
                    pending.append(following)

    def _saved_by(self, node: Any, by_body: Mapping[int, int]) -> None:
        for name, data in saved(node):
            if not is_a(data, torch.Tensor):  # packed by a hook: an object like any other
                self._graph[id(data)].append(Link(id(node), f".{name}"))
                continue
            try:
                key = -address(data.untyped_storage())
            except (NotImplementedError, RuntimeError):  # sparse, opaque, or without a storage
                continue
            if key in self._wanted:
                self.links[key].append(Link(id(node), f".{name}"))
                self.objects[id(node)] = node
            if body(data) in by_body:
                self._graph[by_body[body(data)]].append(Link(id(node), f".{name}"))

    def _arrays(self) -> set[int]:
        """Arrays over tensors that nothing else was found to hold, and what refers to them."""
        tensors = {link.parent for key in self._wanted for link in self.links[key]}
        alone = {one: self.objects[one] for one in tensors if one not in self.links and one not in self.roots}
        level: set[int] = set()
        for above, below, how in holders_of(alone):
            self.objects.setdefault(id(above), above)
            self.links[id(below)].append(Link(id(above), how))
            level.add(id(above))
        return level

    def _climb(self, level: set[int]) -> None:
        """Walk up from some objects, level by level."""
        # What the collector reports as a referrer and is only ours.
        ours = {id(self.objects), id(self._nodes), id(vars(self))}
        visited: set[int] = set()
        for _ in range(DEEPEST):
            level = set(islice((one for one in level - visited if not self._is_root(one)), WIDEST))
            visited |= level
            if not level:
                return
            following: set[int] = set()
            for one in level:
                for link in self._graph.get(one, ()):
                    self.objects.setdefault(link.parent, self._nodes.get(link.parent))
                    self.links[one].append(link)
                    following.add(link.parent)
            found = gc.get_referrers(*[self.objects[one] for one in level])
            ours.add(id(found))
            for referrer in found:
                if id(referrer) in ours:
                    continue
                for held in gc.get_referents(referrer):
                    if id(held) in level:
                        self.links[id(held)].append(Link(id(referrer), None))
                        self.objects[id(referrer)] = referrer
                        following.add(id(referrer))
            del found
            level = following

    def _is_root(self, one: int) -> bool:
        """Whether an object is held by a variable; then nobody has to be asked who else holds it."""
        thing = self.objects[one]
        roots = list(self._locals.get(one, ()))
        if is_a(thing, dict) and one in self._globals:
            roots.append(Root("module", self._globals[one].__name__, self._globals[one]))
        elif is_a(thing, ModuleType):
            roots.append(Root("module", thing.__name__, thing))
        elif is_a(thing, type):
            roots.append(Root("class", thing.__qualname__, thing))
        if roots:
            self.roots[one] = roots
        return bool(roots)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith("evenload.")


def _variables() -> tuple[Mapping[int, list[Root]], Mapping[int, ModuleType]]:
    """Identity of every value of a local variable of a running function, and of the dictionaries of modules."""
    values: dict[int, list[Root]] = defaultdict(list)
    modules = {id(vars(module)): module for module in list(sys.modules.values()) if type(module) is ModuleType}
    frames: list[FrameType | None] = [*_running().values()]
    while frames:
        frame = frames.pop()
        if frame is None:
            continue
        frames.append(frame.f_back)
        if not _is_ours(frame) and frame.f_code.co_flags & CO_NEWLOCALS:
            variables = frame.f_locals
            for name, value in variables.items():
                values[id(value)].append(Root("variable", name, frame.f_code))
            # Before Python 3.13 this is a snapshot that the frame keeps, and with it everything inside; unless the
            # program has asked for it too, with locals().
            if sys.version_info < (3, 13) and sys.getrefcount(variables) <= _SNAPSHOT:
                variables.clear()
    frame = None  # one of them is this function's own: holding it would be a cycle, and hold all frames above
    return values, modules
