"""Groups of collectives."""

from evenload.runtime.collectives import Collective, alike, of_all_layers


def one(module, **changes):
    return Collective(
        **{"name": "all_gather", "ranks": 2, "phase": "forward", "module": module, "nbytes": 8, **changes}
    )


def test_layers_are_put_together_and_the_largest_come_first():
    groups = alike(
        [one("layers.0.mlp"), one("layers.1.mlp"), one(None, nbytes=100), one("layers.1.mlp", phase="backward")]
    )
    assert [(group.module, group.count, group.nbytes, group.phase) for group in groups] == [
        (None, 1, 100, "forward"),
        ("layers.*.mlp", 2, 16, "forward"),
        ("layers.*.mlp", 1, 8, "backward"),
    ]


def test_layers_that_did_not_run_have_the_collectives_of_those_that_stand_for_them():
    heard = [one("model.layers.1"), one("model.layers.1.mlp"), one("model.norm"), one("other.layers.1.mlp")]
    everywhere = of_all_layers(heard, "model.layers", [0, 1, 1])
    assert [group.module for group in everywhere] == [
        "model.layers.1",
        "model.layers.2",
        "model.layers.1.mlp",
        "model.layers.2.mlp",
        "model.norm",
        "other.layers.1.mlp",
    ]
