"""The real modules still do what the golden files say."""

from __future__ import annotations

import json
from pathlib import Path

import cases
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recording import trace_case  # noqa: E402  # needs torch

DATA = Path(__file__).parent.parent / "data" / "profile" / "traces"

SMALL_SET = ("llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "divided")
"""One family of each kind; `python -m benchmarks.trace_blocks --check` compares all of them."""


@pytest.mark.parametrize("family", SMALL_SET)
def test_a_new_trace_equals_the_golden_one(family: str) -> None:
    torch.set_num_threads(1)
    golden = json.loads((DATA / f"{family}.json").read_text())["cases"]
    known = {entry["case"]["name"]: entry["layers"] for entry in golden}
    case = cases.FAMILIES[family]()[0]
    assert json.loads(json.dumps(trace_case(case))) == known[case.name]


def test_every_case_has_a_golden_trace() -> None:
    for family, make in cases.FAMILIES.items():
        golden = json.loads((DATA / f"{family}.json").read_text())["cases"]
        assert [entry["case"] for entry in golden] == [case.as_json() for case in make()], family
