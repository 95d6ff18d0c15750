"""Published models by name, and the one place that decides what a model argument means."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

from evenload.errors import EvenloadError, did_you_mean
from evenload.files import exists
from evenload.model.huggingface import load_config, model_from_config, read_config
from evenload.model.spec import Model

Source = Literal["preset", "config", "settings", "module"]
"""What a model argument names: a preset, a Hugging Face configuration, a settings file, a Python function."""

_MODULE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_REPOSITORY: Final = re.compile(r"[\w.-]+/[\w.-]+")
_SETTINGS: Final = (".yaml", ".yml")


def preset_names() -> list[str]:
    """Names that `preset` knows, sorted."""
    return sorted(_configs())


def preset(name: str) -> Model:
    """A published model by name, such as `llama-3-8b`. Upper and lower case are the same.

    Raises:
        EvenloadError: no preset of that name; with the nearest one.
    """
    config = _configs().get(name.strip().lower())
    if config is None:
        raise EvenloadError(
            f"there is no preset {name!r}",
            fix=did_you_mean(name.strip().lower(), preset_names()) or f"presets: {', '.join(preset_names())}",
        )
    name = name.strip().lower()
    return model_from_config(config, where=f"preset {name}", name=name)


def open_model(text: str) -> Model:
    """The model that an argument names: a preset, a `config.json`, or a directory that holds one.

    Raises:
        EvenloadError: nothing of that kind, or a kind that is read elsewhere (see `model_source`).
    """
    source = model_source(text)
    if source == "preset":
        return preset(text)
    if source == "config":
        return read_config(text)
    if source == "settings":
        raise EvenloadError(
            "a settings file is no model on its own", where=text, fix="name a preset or a Hugging Face config.json"
        )
    raise EvenloadError(
        f"{text!r} names a Python function; sizes are read from a preset or a config.json",
        fix="name a preset, such as llama-3-8b, or the path of a config.json",
    )


def open_config(text: str) -> Mapping[str, Any]:
    """The Hugging Face configuration that an argument names, by preset or by file: what `open_model` reads.

    Raises:
        EvenloadError: nothing of that kind.
    """
    source = model_source(text)
    if source == "preset":
        return dict(_configs()[text.strip().lower()])
    if source == "config":
        return load_config(text)
    raise EvenloadError(f"{text!r} names no Hugging Face configuration", fix="name a preset or a config.json")


def model_source(text: str) -> Source:
    """What a model argument names. A preset wins over a file of the same name: write `./name` for the file.

    Raises:
        EvenloadError: neither a preset nor an existing file nor `module:function`.
    """
    if not text.strip():
        raise EvenloadError("the model has no name", fix="name a preset, such as llama-3-8b, or a config.json")
    if text.strip().lower() in _configs():
        return "preset"
    path = Path(text)
    if exists(path):
        if path.suffix.lower() in _SETTINGS:
            return "settings"
        return "config"
    if _MODULE.fullmatch(text):
        return "module"
    if path.suffix.lower() in (".json", *_SETTINGS) or (path.parent != Path() and not _REPOSITORY.fullmatch(text)):
        raise EvenloadError("no such file", where=text, fix="give the path of a config.json, or name a preset")
    near = did_you_mean(text.strip().lower().rsplit("/", 1)[-1], preset_names())
    if _REPOSITORY.fullmatch(text):
        raise EvenloadError(
            f"{text!r} is neither a preset nor a directory; nothing is downloaded",
            fix=near or "save the repository's config.json and give its path",
        )
    raise EvenloadError(f"{text!r} is neither a preset nor a file", fix=near or f"presets: {', '.join(preset_names())}")


@cache
def _configs() -> dict[str, dict[str, object]]:
    """The shipped configurations; one that is `like` another states only what differs."""
    raw: dict[str, dict[str, object]] = json.loads(files("evenload.model").joinpath("presets.json").read_bytes())

    def whole(config: dict[str, object]) -> dict[str, object]:
        base = config.get("like")
        own = {key: value for key, value in config.items() if key != "like"}
        return {**whole(raw[base]), **own} if isinstance(base, str) else own

    return {name: whole(config) for name, config in raw.items()}
