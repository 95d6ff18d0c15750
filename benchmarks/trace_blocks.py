"""Record the golden traces that pin the operator graphs of `evenload.profile.blocks`.

Builds small real models of Hugging Face transformers on the CPU, runs one forward pass with loss, and writes, layer by
layer, every operator that made a storage or kept one for backward:

    python -m benchmarks.trace_blocks                 # rewrite tests/data/profile/*.json
    python -m benchmarks.trace_blocks --check llama   # trace again and compare, write nothing

The columns of a row: path and names of the operator, bytes of the storages it made, what it keeps, what it reads.
A number is the n-th storage that the layer made; `input` is the layer's input; `table` is something made once for the
whole forward (positions, masks, labels, tokens). Parameters are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "profile"))

import cases  # noqa: E402  # lives beside the tests that share it
from cases import Case  # noqa: E402
from tracer import Trace, record  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FAMILIES = ("llama",)
DATA = ROOT / "tests" / "data" / "profile"


def trace_case(case: Case) -> dict[str, list[list[Any]]]:
    """Rows of every different layer of a case: `embedding`, `0`, `1` ..., `head`."""
    config = transformers.AutoConfig.for_model(case.family, **{**cases.BASE, **case.config})
    experts = {"experts_implementation": "grouped_mm"} if hasattr(config, "num_experts_per_tok") else {}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[case.dtype], attn_implementation=case.attention, **experts
    ).train()
    tokens = torch.randint(0, config.vocab_size, (case.batch, case.seq))
    trace, _ = record(model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False), {"tokens": tokens})
    return split_layers(trace)


def split_layers(trace: Trace) -> dict[str, list[list[Any]]]:
    """Rows of a whole model, cut into layers; what the model does once for all layers is left out."""
    layers: dict[str, list[Any]] = {}
    current = "embedding"
    for row in trace.rows:
        parts = row.path.split(".")
        if parts[:2] == ["model", "layers"]:
            current, path = parts[2], ".".join(parts[3:])
        elif current != "embedding" and row.path in {"model.norm", "lm_head", ""}:
            current, path = "head", row.path.removeprefix("model.")
        elif row.path.startswith("model.embed_tokens"):
            path = row.path.removeprefix("model.")
        else:
            continue
        layers.setdefault(current, []).append((path, row))
    return {name: _numbered(rows, trace) for name, rows in layers.items()}


def _numbered(rows: list[Any], trace: Trace) -> list[list[Any]]:
    own: dict[int, int] = {}
    for _, row in rows:
        for number in row.made:
            own[number] = len(own)
    entering = next((number for _, row in rows for number in row.reads if number not in trace.known), None)

    def name(number: int) -> int | str | None:
        if number in own:
            return own[number]
        if trace.known.get(number, "tokens") != "tokens":
            return None  # a parameter
        return "input" if number == entering else "table"

    def names(numbers: list[int]) -> list[int | str]:
        return sorted({found for number in numbers if (found := name(number)) is not None}, key=str)

    return [
        [
            ".".join(part for part in (path, row.name, row.aten if row.aten != row.name else "") if part),
            [trace.nbytes[number] for number in row.made],
            names(row.keeps),
            names(row.reads),
        ]
        for path, row in rows
    ]


def golden(family: str) -> str:
    """Text of a golden file: one row a line."""
    lines = [f'{{"recorded_with": {{"torch": "{torch.__version__}", "transformers": "{transformers.__version__}"}},']
    lines.append(' "cases": [')
    entries = []
    for case in getattr(cases, family)():
        layers = ",\n".join(
            f'   "{name}": [\n' + ",\n".join("    " + json.dumps(row) for row in rows) + "\n   ]"
            for name, rows in trace_case(case).items()
        )
        entries.append(f'  {{"case": {json.dumps(case.as_json())},\n   "layers": {{\n{layers}}}}}')
    return "\n".join(lines) + "\n" + ",\n".join(entries) + "\n]}\n"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    differs = False
    for family in options.families or FAMILIES:
        path, text = DATA / f"{family}.json", golden(family)
        if options.check:
            same = path.exists() and json.loads(path.read_text())["cases"] == json.loads(text)["cases"]
            differs |= not same
            print(f"{family}: {'same' if same else 'differs'}")
        else:
            DATA.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"{family}: {len(text)} bytes")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
