"""Record how many parameters `transformers` gives every preset: `python -m tests.model.make_golden_counts`.

Writes `tests/data/models/counts.json`: in total, and per layer as runs of `[parameters, layers]`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.model.reference import build, decoder_of, language_parameters, layer_parameters

from evenload.model.presets import _configs

TARGET = Path(__file__).parents[1] / "data" / "models" / "counts.json"


def counts() -> dict[str, dict[str, object]]:
    """Counts by preset name."""
    result: dict[str, dict[str, object]] = {}
    for name, config in sorted(_configs().items()):
        model = build(config)
        layers = decoder_of(model).layers
        result[name] = {
            "total": language_parameters(model),
            "layers": layer_parameters(sum(p.numel() for p in layer.parameters()) for layer in layers),
        }
    return result


def main() -> None:
    """Write the file."""
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    rows = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in counts().items())
    TARGET.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
