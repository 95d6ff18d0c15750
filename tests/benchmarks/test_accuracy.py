from __future__ import annotations

import json

from benchmarks import accuracy

MODEL = {
    "name": "m",
    "family": "llama",
    "layers": 4,
    "hidden": 512,
    "heads": 8,
    "ffn": 1408,
    "vocab": 32000,
    "tied": False,
}
CONFIG = {
    "model": MODEL,
    "seq": 1024,
    "mbs": 1,
    "num_microbatches": 4,
    "world": 2,
    "tp": 1,
    "pp": 2,
    "dp": 1,
    "optimizer": "distributed optimizer",
    "framework": "Megatron-LM",
    "gpu": "H100",
}


def point(name, measured, kind="measured", **config):
    return {"id": name, "kind": kind, "config": {**CONFIG, **config}, "measured": measured}


POINTS = [
    point("both", {"per_stage": [{"stage": 0, "max_allocated_gib": 1.0}, {"stage": 1, "max_allocated_gib": 2.0}]}),
    point("last", {"max_allocated_gib": 2.0}, where="last rank"),
    point("reserved", {"max_reserved_gib": 2.0}),
    point("oom", {"lower_bound_gib": 1.0}, kind="oom"),
    point("policy", {"max_allocated_gib": 2.0}, recompute="selective(op)"),
    point("family", {"max_allocated_gib": 2.0}, model={**MODEL, "family": "gpt"}),
    point("degrees", {"max_allocated_gib": 2.0}, tp=3),
]


def test_every_point_is_compared_or_skipped_with_a_reason(capsys, monkeypatch, tmp_path):
    path = tmp_path / "points.json"
    path.write_text(json.dumps({"points": POINTS}))
    monkeypatch.setattr("sys.argv", ["accuracy.py", str(path), "--json"])
    accuracy.main()
    rows = json.loads(capsys.readouterr().out)
    assert set(rows[0]) == {"id", "measured", "predicted", "error_percent", "stage", "reason_if_skipped"}
    compared = {(row["id"], row["stage"]): row for row in rows if row["error_percent"] is not None}
    assert set(compared) == {("both", 0), ("both", 1), ("last", 1)}
    assert compared["both", 1]["predicted"] == compared["last", 1]["predicted"]
    for row in compared.values():
        assert abs(row["error_percent"] - 100 * (row["predicted"] / row["measured"] - 1)) < 0.1
    skipped = {row["id"]: row for row in rows if row["error_percent"] is None}
    assert set(skipped) == {"reserved", "oom", "policy", "family", "degrees"}
    assert all(row["reason_if_skipped"] for row in skipped.values())
    assert skipped["reserved"]["predicted"] is not None
    assert skipped["policy"]["predicted"] is None
