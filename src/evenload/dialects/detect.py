"""Any settings file: which dialect it is in, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Final, get_args

from evenload.dialects.mindformers import LISTS, read_mindformers
from evenload.dialects.mindformers_keys import READ_HERE, SECTIONS
from evenload.dialects.mindformers_pynative import is_pynative, read_pynative
from evenload.dialects.native import read_native
from evenload.dialects.reading import Dialect, Reading
from evenload.dialects.typed import at
from evenload.dialects.yaml_source import YamlSource, parse_yaml
from evenload.errors import EvenloadError, did_you_mean
from evenload.files import read_text

DIALECTS: Final[tuple[Dialect, ...]] = get_args(Dialect)
_YAML: Final = (".yaml", ".yml", ".json")


def read_settings(path: str | Path, *, dialect: str | None = None, num_layers: int | None = None) -> Reading:
    """The plan in a settings file.

    Args:
        path: the file.
        dialect: one of `DIALECTS`; None looks at what is in the file.
        num_layers: layers of the model, for settings that do not name them.

    Raises:
        EvenloadError: unreadable, in no known dialect, or wrong in it; with `file:line:column`.
    """
    if dialect is not None and dialect not in DIALECTS:
        fix = did_you_mean(dialect, list(DIALECTS)) or f"use one of {', '.join(DIALECTS)}"
        raise EvenloadError(f"there is no dialect {dialect!r}", where="--dialect", fix=fix)
    text, name = read_text(path), str(path)
    if dialect == "megatron" or (dialect is None and Path(path).suffix.lower() not in _YAML and _has_arguments(text)):
        from evenload.dialects.megatron import read_megatron  # noqa: PLC0415  # only for its own files

        return read_megatron(text, name=name)
    source = parse_yaml(text, name=name)
    match dialect or _detect(source):
        case "evenload":
            return read_native(source)
        case "mindformers-pynative":
            return read_pynative(source, num_layers=num_layers)
        case _:
            return read_mindformers(source, num_layers=num_layers)


def _has_arguments(text: str) -> bool:
    return "--pipeline-model-parallel-size" in text or "--num-layers" in text


def _detect(source: YamlSource) -> Dialect:
    data = source.data
    if "evenload" in data or ("setup" in data and "layout" in data):
        return "evenload"
    if is_pynative(source):
        return "mindformers-pynative"
    sections = (*SECTIONS, *READ_HERE)
    top = (*LISTS, *(path[0] for path in sections if len(path) == 1))  # present is enough, also without a value
    if any(name in data for name in top) or any(at(source, path) is not None for path in sections):
        return "mindformers"
    if "model_type" in data or "architectures" in data:
        raise EvenloadError(
            "this is a model's config.json, which holds no layout and no recomputation",
            where=source.name,
            fix="name the settings file here, or use `evenload estimate` for the model",
        )
    known = [path[-1] for path in sections]
    near = next((f"{key!r}: {hint}" for key in data if (hint := did_you_mean(key, known))), None)
    raise EvenloadError(
        "this is neither an evenload plan nor MindFormers settings",
        where=source.name,
        fix=near or f"a settings file has one of {', '.join(dict.fromkeys(known))}; --dialect reads it as one anyway",
    )
