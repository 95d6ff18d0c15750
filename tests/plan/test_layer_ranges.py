from hypothesis import given
from hypothesis import strategies as st

from evenload.plan.layer_ranges import layer_ranges


def test_neighbours_are_joined() -> None:
    assert layer_ranges({3, 0, 1, 2, 5, 8, 7}) == "0-3,5,7-8"


@given(st.sets(st.integers(0, 40)))
def test_the_text_names_every_layer_once(layers: set[int]) -> None:
    named: list[int] = []
    for part in layer_ranges(layers).split(","):
        if part != "none":
            first, _, last = part.partition("-")
            named += range(int(first), int(last or first) + 1)
    assert named == sorted(layers)
