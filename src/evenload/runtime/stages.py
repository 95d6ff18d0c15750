"""One rank's chunks of a decoder, made from the whole model without the parameters of other ranks.

A chunk is the model itself, with fewer layers: its own code computes masks and positions on every stage. On the way
in, what comes before the layers is skipped and the first layer gets what the stage before sent; on the way out, forward
ends behind the last layer of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from evenload.errors import EvenloadError
from evenload.record.modules import ModulePaths
from evenload.runtime.anatomy import Anatomy, take_result
from evenload.runtime.materials import Materials
from evenload.runtime.placement import Place

COUNTS: Final = frozenset(("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
"""What configurations call the number of layers."""


class Chunk(nn.Module):
    """Some layers of a decoder, with what comes before them on the first stage and after them on the last.

    Its `forward` takes the model's own input on every stage, and what the stage before sent on all but the first.
    """

    def __init__(
        self, model: nn.Module, place: Place, anatomy: Anatomy, names: Mapping[str, str], buffers: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.model = model
        self.place = place
        self.container = anatomy.container
        """Path of what holds the layers, below `model`."""
        self.full_names = dict(names)
        """Own parameter names -> names in the whole model."""
        self.full_buffers = dict(buffers)
        """Own names of buffers that belong to the model's state -> names in the whole model."""
        self.anatomy = anatomy
        self._received: torch.Tensor | None = None
        self._handles: list[Any] = []
        self.arm()

    @property
    def layers(self) -> list[nn.Module]:
        """Its repeated layers."""
        return list(self.model.get_submodule(self.container).children())

    def arm(self) -> None:
        """Put the doors of the chunk innermost: to be called again after anything else has put hooks on its layers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        layers = self.layers
        if not self.place.first:
            self._handles.append(layers[0].register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
        if not self.place.last:
            self._handles.append(layers[-1].register_forward_hook(self._leave))

    def forward(self, hidden: torch.Tensor | None = None, *, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
        """Run the chunk.

        Args:
            hidden: what the stage before sent; none on the first stage.
            tokens: what the whole model is called with.
            more: keywords that the whole model is called with.

        Returns:
            What the next stage gets, or the logits on the last stage.
        """
        if (hidden is None) is not self.place.first:
            raise EvenloadError(f"chunk {self.place.index} {'is the first' if self.place.first else 'gets no input'}")
        self._received = hidden
        try:
            return take_result(self.model(tokens, **more))
        except _Cut as cut:
            return cut.hidden
        finally:
            self._received = None

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        received, place = self._received, self.anatomy.argument
        self._received = None
        if isinstance(place, int):
            return (*args[:place], received, *args[place + 1 :]), kwargs
        return args, {**kwargs, place: received}

    def _leave(self, _: nn.Module, _args: Any, result: Any) -> None:
        raise _Cut(result[0] if self.anatomy.in_tuple else result)


class _Cut(BaseException):
    """Ends forward behind the last layer of a chunk. Not an `Exception`: no model's own handler should take it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Skipped(nn.Module):
    """Stands for a module of another stage: has no parameters, and results of the right shape without memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["_skipped"] = (module,)  # in a tuple: its parameters are not this module's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module would return, for its shape only."""
        module: nn.Module = self.__dict__["_skipped"][0]
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        state = {name: one.to("meta") for name, one in module.named_buffers()}
        meta_args, meta_kwargs = tree_map_only(torch.Tensor, lambda one: one.to("meta"), (args, kwargs))
        with torch.no_grad():
            returned = functional_call(module, state, meta_args, meta_kwargs)
        return tree_map_only(torch.Tensor, lambda one: _zeros(one, device), returned)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_skipped"][0], name)


class Passage(nn.Module):
    """The layer of a chunk that has none."""

    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__()
        self._argument, self._in_tuple = anatomy.argument, anatomy.in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the input: a copy, because what is received and what is sent live on by themselves."""
        given: torch.Tensor = args[self._argument] if isinstance(self._argument, int) else kwargs[self._argument]
        return (given.clone(),) if self._in_tuple else given.clone()


def make_chunk(materials: Materials, place: Place, anatomy: Anatomy) -> Chunk:
    """One chunk of a pipeline. Parameters that have no values yet get them from `materials.fill`.

    Args:
        materials: where its parameters come from.
        place: which layers it has, and whether it is the first or the last.
        anatomy: of the whole model.
    """
    own_layers = [anatomy.layers[number] for number in place.layers]
    inside = tuple(f"{path}." for path in own_layers)
    everything = [name for name, _ in materials.model.named_parameters(remove_duplicate=False)]
    ends = (anatomy.before if place.first else frozenset[str]()) | (anatomy.after if place.last else frozenset[str]())
    own = frozenset(name for name in everything if name in ends or name.startswith(inside))
    left_out = frozenset(anatomy.layers) - frozenset(own_layers)
    model = materials.copy(own, left_out)
    paths = _keep_layers(model, anatomy, place)
    _skip_ends(model, anatomy, own)
    _narrow_configs(model, len(anatomy.layers), list(place.layers) or [0])
    names = {_local(name, paths): name for name in everything if name in own}
    return Chunk(model, place, anatomy, names, _buffers(materials.model, model, paths, left_out))


def name_modules(paths: ModulePaths, chunks: nn.ModuleList) -> None:
    """Tell a recording the paths that the modules of one rank have in the whole model."""
    paths.put(chunks, "")
    for chunk in cast("list[Chunk]", list(chunks)):
        paths.put(chunk, "")
        names = dict(chunk.model.get_submodule(chunk.container).named_children())
        layers = [chunk.anatomy.layers[number] for number in chunk.place.layers]
        own = {f"{chunk.container}.{name}": layer for name, layer in zip(names, layers, strict=False)}  # or a passage
        for path, module in cast("Iterator[tuple[str, nn.Module]]", chunk.model.named_modules()):
            local = next((one for one in own if path == one or path.startswith(f"{one}.")), None)
            paths.put(module, path if local is None else own[local] + path.removeprefix(local))


def _buffers(whole: nn.Module, model: nn.Module, paths: Mapping[str, str], left_out: frozenset[str]) -> dict[str, str]:
    """Own names -> names in the whole model, of the buffers that are saved with it and that a chunk has."""
    elsewhere = tuple(f"{path}." for path in left_out)
    kept = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    saved = {_local(name, paths): name for name in whole.state_dict() if not name.startswith(elsewhere)}
    return {local: full for local, full in saved.items() if local in kept}


def _local(name: str, paths: Mapping[str, str]) -> str:
    for full, local in paths.items():
        if name.startswith(f"{full}."):
            return local + name.removeprefix(full)
    return name


def _keep_layers(model: nn.Module, anatomy: Anatomy, place: Place) -> dict[str, str]:
    """Leave only the chunk's layers in their container; their paths in the whole model -> their new ones."""
    container = model.get_submodule(anatomy.container)
    numbered = not isinstance(container, nn.ModuleDict)  # lists are often read by position
    kept: list[tuple[str, nn.Module]] = []
    paths: dict[str, str] = {}
    for position, number in enumerate(place.layers):
        full = anatomy.layers[number]
        key = str(position) if numbered else full.rpartition(".")[2]
        kept.append((key, model.get_submodule(full)))
        paths[full] = f"{anatomy.container}.{key}" if anatomy.container else key
    if not kept:
        kept.append(("0" if numbered else anatomy.layers[0].rpartition(".")[2], Passage(anatomy)))
    for key, _ in list(container.named_children()):
        delattr(container, key)
    for key, layer in kept:
        container.add_module(key, layer)
    return paths


def _skip_ends(model: nn.Module, anatomy: Anatomy, own: frozenset[str]) -> None:
    """Put stand-ins where parameters of other stages are."""
    steps = anatomy.container.split(".") if anatomy.container else []
    around = [".".join(steps[:count]) for count in range(len(steps))]
    for path in around:
        module = model.get_submodule(path)
        for name, _ in list(module.named_children()):
            full = f"{path}.{name}" if path else name
            if full not in around and full != anatomy.container:
                _skip(module, name, full, own)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (f"{path}.{name}" if path else name) not in own:
                delattr(module, name)
                setattr(module, name, _zeros(parameter, torch.device("cpu")))


def _skip(parent: nn.Module, name: str, full: str, own: frozenset[str]) -> None:
    child = parent.get_submodule(name)
    held = [f"{full}.{one}" for one, _ in child.named_parameters(remove_duplicate=False)]
    if held and own.isdisjoint(held):
        setattr(parent, name, Skipped(child))
    elif not own.issuperset(held):
        for inner, _ in list(child.named_children()):
            _skip(child, inner, f"{full}.{inner}", own)


def _narrow_configs(model: nn.Module, count: int, kept: Sequence[int]) -> None:
    """Tell configurations that count or list the layers how many there are now; nothing keeps a cache in training."""
    configs: dict[int, dict[str, Any]] = {}
    for module in model.modules():
        config: object = getattr(module, "config", None)
        if config is not None and hasattr(config, "__dict__"):
            configs[id(config)] = vars(config)
    for facts in configs.values():
        for name, value in list(facts.items()):
            if type(value) is int and value == count and name in COUNTS:
                facts[name] = len(kept)
            elif type(value) is list and len(cast("list[Any]", value)) == count:
                facts[name] = [value[number] for number in kept]
        if facts.get("use_cache") is True:
            facts["use_cache"] = False


def _zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Zeros of a shape, without its memory."""
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
