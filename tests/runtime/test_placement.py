"""Who holds which chunk, and the policy of a chunk."""

from __future__ import annotations

from tests.runtime.cases import MIXED

from evenload.plan.layout import Layout
from evenload.plan.policy import Policy
from evenload.runtime.placement import local_policy, places, recomputes


def test_every_layer_is_in_one_place_in_order():
    for style in ("loop", "v"):
        found = places(Layout(((2, 0, 3), (1, 4, 1))), style)
        assert [layer for place in found for layer in place.layers] == list(range(11))
        assert [place.index for place in found] == list(range(6))
        assert [place.first for place in found] == [True] + [False] * 5
        assert [place.last for place in found] == [False] * 5 + [True]


def test_the_policy_of_a_chunk_is_that_of_its_layers():
    for layers in (range(4), range(4, 9), range(9, 11), range(5, 5)):
        mine = local_policy(MIXED, layers)
        for position, layer in enumerate(layers):
            assert mine.for_layer(position) == MIXED.for_layer(layer)
        assert recomputes(mine) == any(MIXED.for_layer(layer) != Policy().for_layer(0) for layer in layers)
