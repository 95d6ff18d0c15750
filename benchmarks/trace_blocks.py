"""Record the golden traces that pin the operator graphs of `evenload.profile.blocks`.

Builds small real models of Hugging Face transformers on the CPU, runs one forward pass with loss, and writes, layer by
layer, every operator that made a storage or kept one for backward (`tests/profile/recording.py` says how):

    python -m benchmarks.trace_blocks                 # rewrite tests/data/profile/*.json
    python -m benchmarks.trace_blocks --check llama   # trace again and compare, write nothing
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "profile"))

import cases  # noqa: E402  # lives beside the tests that share it
from recording import trace_case  # noqa: E402

DATA = ROOT / "tests" / "data" / "profile" / "traces"


def golden(family: str) -> str:
    """Text of a golden file: one row a line."""
    entries: list[str] = []
    for case in cases.FAMILIES[family]():
        layers = ",\n".join(
            f'   "{name}": [\n' + ",\n".join("    " + json.dumps(row) for row in rows) + "\n   ]"
            for name, rows in trace_case(case).items()
        )
        entries.append(f'  {{"case": {json.dumps(case.as_json())},\n   "layers": {{\n{layers}}}}}')
    versions = json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})
    return f'{{"recorded_with": {versions},\n "cases": [\n' + ",\n".join(entries) + "\n]}\n"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"some of {', '.join(cases.FAMILIES)}; all of them without any")
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    differs = False
    for family in options.families or cases.FAMILIES:
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
