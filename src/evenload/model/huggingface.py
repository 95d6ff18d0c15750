"""Hugging Face `config.json` -> `Model`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from evenload.errors import EvenloadError, did_you_mean, shown
from evenload.files import read_json
from evenload.model.architectures import INNER, decoder_keys
from evenload.model.families import Family, assemble
from evenload.model.keys import Keys, as_list, as_mapping
from evenload.model.spec import Model

_TIED_BY_TEXT: Final = frozenset({"llama4"})
_TIED_BY_EITHER: Final = frozenset({"llava", "qwen2_5_vl"})


def read_config(path: str | os.PathLike[str]) -> Model:
    """The model that a `config.json`, or a directory that holds one, describes.

    Raises:
        EvenloadError: no such file, no JSON, or no supported model; with file, and line or key.
    """
    file = _config_file(path)
    config = read_json(file)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return model_from_config(config, where=str(file), name=name or None)


def load_config(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What a `config.json`, or the one in a directory, says: for programs that build the model from it.

    Raises:
        EvenloadError: no such file, or no JSON object in it.
    """
    file = _config_file(path)
    mapping = as_mapping(read_json(file))
    if mapping is None:
        raise EvenloadError(
            "the configuration is no JSON object", where=str(file), fix="give a Hugging Face config.json"
        )
    return mapping


def _config_file(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    return file / "config.json" if os.path.isdir(file) else file  # noqa: PTH112  # Path.is_dir fails on a long name


def model_from_config(config: object, *, where: str = "config.json", name: str | None = None) -> Model:
    """The model that a parsed configuration describes.

    Args:
        config: the mapping, as in the file. Never changed.
        where: what to call it in errors.
        name: what to call the model; None: what the configuration says, else its family.

    Raises:
        EvenloadError: an unsupported architecture, or a key that is missing or wrong; with its path.
    """
    mapping = as_mapping(config)
    if mapping is None:
        raise EvenloadError("the configuration is no JSON object", where=where, fix="give a Hugging Face config.json")
    outer = Keys(mapping, where=where)
    keys, family = decoder_keys(outer)
    decoder = family.build(keys)
    tied = _tied(outer, keys, family)
    positions = keys.optional("max_position_embeddings", most=2**40)
    _notices(outer, keys)
    return assemble(
        decoder,
        name=name or _stated_name(outer) or family.name,
        family=family.name,
        tied=tied,
        max_positions=positions,
        source=where,
        ignored=_ignored(outer, keys),
        notices=(*outer.notices, *(keys.notices if keys is not outer else ())),
    )


def _tied(outer: Keys, keys: Keys, family: Family) -> bool:
    """Whether embedding and head share their weight.

    The wrapper's word counts before that of its language model, and the family's default where neither says; a few
    wrappers of `transformers` listen to the language model alone, or tie if either says so.
    """
    inner = keys.flag("tie_word_embeddings", absent=family.tied)
    if outer is keys:
        return inner
    said = outer.has("tie_word_embeddings") or keys.has("tie_word_embeddings")
    stated = outer.flag("tie_word_embeddings", absent=inner)
    wrapper = outer.mapping.get("model_type")
    if wrapper == "mistral3" and not said:
        outer.note(
            "tie_word_embeddings is missing; embedding and output projection are counted as two weights, as in the "
            "published models, though transformers ties them when it builds one from this file",
            "tie_word_embeddings",
            "write 'tie_word_embeddings'",
        )
    if wrapper in _TIED_BY_TEXT:
        return inner
    return stated or (inner and wrapper in _TIED_BY_EITHER)


def _stated_name(outer: Keys) -> str | None:
    path = outer.mapping.get("_name_or_path")
    return path.rstrip("/").rsplit("/", 1)[-1] or None if isinstance(path, str) else None


def _notices(outer: Keys, keys: Keys) -> None:
    """Say what is in the configuration and not in the model."""
    left_out = [
        str(key)
        for key, value in outer.mapping.items()
        if isinstance(value, Mapping)
        and str(key).endswith("_config")
        and str(key) not in (*INNER, "quantization_config")
    ]
    if left_out:
        outer.note(
            f"only the language model is read; {', '.join(left_out)} (vision, audio or other parts) is left out",
            left_out[0],
        )
    quantized = next((k for k in (outer, keys) if k.has("quantization_config")), None)
    if quantized is not None:
        quantized.note(
            "quantization_config says how the published weights are stored; parameters are counted by element, "
            "in the data type of the training setup",
            "quantization_config",
        )
    named = as_list(outer.mapping.get("architectures")) or []
    other = [name for name in map(_named, named) if "CausalLM" not in name and "Generation" not in name]
    if other:
        outer.note(f"{other[0]} is read as a causal language model with an output projection", "architectures")
    for reader in {id(outer): outer, id(keys): keys}.values():
        for key in reader.unread():
            hint = did_you_mean(key, reader.absent()) if len(key) > 4 else None
            if hint and _near(key, reader.absent()):
                reader.note(f"the unknown key {key!r} is ignored", key, hint)


def _near(key: str, absent: list[str]) -> bool:
    from difflib import get_close_matches  # noqa: PLC0415  # only where there are unread keys

    return bool(get_close_matches(key, absent, n=1, cutoff=0.85))


def _ignored(outer: Keys, keys: Keys) -> tuple[str, ...]:
    if keys is outer:
        return outer.unread()
    prefix = keys.path.removeprefix("$.")
    return (*outer.unread(), *(f"{prefix}.{key}" for key in keys.unread()))


def _named(architecture: object) -> str:
    return architecture[:100] if isinstance(architecture, str) else shown(architecture)
