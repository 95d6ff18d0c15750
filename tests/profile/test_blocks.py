"""The operator graphs of the `torch` backend equal traces of the real modules, operator by operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest

from evenload.plan.operators import Graph
from evenload.profile.blocks import block_graph

DATA = Path(__file__).parent.parent / "data" / "profile" / "traces"
SMALL = 16
"""Bytes up to which a trace leaves a storage out."""


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


def rows_of(graph: Graph) -> list[list[Any]]:
    """A graph in the form of a golden trace."""
    numbers: dict[str, int] = {}
    rows = []
    for operator in graph.operators:
        made = [name for name in operator.outputs if graph.nbytes(name) > SMALL]
        for name in made:
            numbers[name] = len(numbers)
        if made or operator.saves:
            keeps, reads = (_names(found, numbers, graph) for found in (operator.saves, operator.inputs))
            rows.append([operator.label, [graph.nbytes(name) for name in made], keeps, reads])
    return rows


def _names(found: tuple[str, ...], numbers: dict[str, int], graph: Graph) -> list[int | str]:
    named: set[int | str] = set()
    for name in found:
        if name in numbers:
            named.add(numbers[name])
        elif name.startswith(("position.", "labels", "tokens")):
            named.add("table")
        elif name == graph.input:
            named.add("input")
    return sorted(named, key=str)


def on_cuda(rows: list[list[Any]]) -> list[list[Any]]:
    """A trace with the names that operators have on CUDA, and in the traces of `evenload.recompute`."""
    return [[_cuda_name(row[0]), *row[1:]] for row in rows]


def _cuda_name(label: str) -> str:
    label = label.replace("experts.float.", "experts.int.")  # row counts are integers on CUDA, fp32 on the CPU
    label = label.replace("flash_attention_for_cpu", "flash_attention")
    return label.replace("scaled_dot_product_attention._to_copy", "_to_copy")  # a conversion is named by itself


@pytest.mark.parametrize(("case", "layer", "rows"), GOLDEN)
def test_a_graph_equals_the_trace_of_the_real_module(case: dict[str, Any], layer: str, rows: list[list[Any]]) -> None:
    model, setup = models.model_of(case), models.setup_of(case)
    assert rows_of(block_graph(model, models.layer_of(model, layer), setup)) == on_cuda(rows)


@pytest.mark.parametrize(("case", "layer", "rows"), GOLDEN)
def test_kept_bytes_equal_the_trace_in_total(case: dict[str, Any], layer: str, rows: list[list[Any]]) -> None:
    model, setup = models.model_of(case), models.setup_of(case)
    sizes = [size for row in rows for size in row[1]]
    kept = {name for row in rows for name in row[2]}
    expected = sum(sizes[name] for name in kept if isinstance(name, int))
    if "input" in kept:
        width = {"bf16": 2, "fp16": 2, "fp32": 4}[setup.dtype]
        expected += setup.tokens * model.hidden * width // (setup.tp if setup.sequence_parallel else 1)
    assert block_graph(model, models.layer_of(model, layer), setup).kept_bytes == expected
