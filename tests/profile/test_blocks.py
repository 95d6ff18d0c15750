"""The operator graphs of the `torch` backend equal traces of the real modules, operator by operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest

from evenload.model import Layer, Model
from evenload.plan.operators import Graph
from evenload.profile.blocks import block_graph

DATA = Path(__file__).parent.parent / "data" / "profile"


def _golden() -> list[Any]:
    found = []
    for path in sorted(DATA.glob("*.json")):
        for entry in json.loads(path.read_text())["cases"]:
            for layer, rows in entry["layers"].items():
                found.append(
                    pytest.param(entry["case"], layer, rows, id=f"{path.stem}-{entry['case']['name']}-{layer}")
                )
    return found


GOLDEN = _golden()


def layer_of(model: Model, name: str) -> Layer:
    """The layer that a golden file calls `embedding`, `head`, `0`, `1` ..."""
    if name == "embedding":
        return model.embedding
    return model.head if name == "head" else model.blocks[int(name)]


def rows_of(graph: Graph) -> list[list[Any]]:
    """A graph in the form of a golden trace."""
    values = {value.name: value for value in graph.values}
    numbers: dict[str, int] = {}
    rows = []
    for operator in graph.operators:
        made = [name for name in operator.outputs if values[name].nbytes > 8]
        for name in made:
            numbers[name] = len(numbers)

        def names(found: tuple[str, ...]) -> list[int | str]:
            named = {_reference(name, numbers, graph) for name in found}
            return sorted((name for name in named if name is not None), key=str)

        label = ".".join(part for part in (operator.path, operator.name, operator.aten) if part)
        rows.append([label, [values[name].nbytes for name in made], names(operator.saves), names(operator.inputs)])
    return rows


def _reference(name: str, numbers: dict[str, int], graph: Graph) -> int | str | None:
    if name in numbers:
        return numbers[name]
    if name.startswith(("position.", "labels", "tokens")):
        return "table"
    return "input" if name == graph.input else None


def on_cuda(rows: list[list[Any]]) -> list[list[Any]]:
    """A CPU trace with the names of the CUDA kernels: they keep the same storages."""
    return [[row[0].replace("_for_cpu", ""), *row[1:]] for row in rows]


@pytest.mark.parametrize(("case", "layer", "rows"), GOLDEN)
def test_a_graph_equals_the_trace_of_the_real_module(case: dict[str, Any], layer: str, rows: list[list[Any]]) -> None:
    model, setup = models.model_of(case), models.setup_of(case)
    assert rows_of(block_graph(model, layer_of(model, layer), setup)) == on_cuda(rows)


@pytest.mark.parametrize(("case", "layer", "rows"), GOLDEN)
def test_kept_bytes_equal_the_trace_in_total(case: dict[str, Any], layer: str, rows: list[list[Any]]) -> None:
    model, setup = models.model_of(case), models.setup_of(case)
    graph = block_graph(model, layer_of(model, layer), setup)
    sizes = [size for row in rows for size in row[1]]
    kept = {name for row in rows for name in row[2]}
    expected = sum(sizes[name] for name in kept if isinstance(name, int))
    if "input" in kept:
        expected += setup.tokens * model.hidden * {"bf16": 2, "fp16": 2, "fp32": 4}[setup.dtype]
    assert graph.kept_bytes == expected
