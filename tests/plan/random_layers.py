"""Random small layers for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from evenload.plan.operators import Graph, Operator, Value


@st.composite
def layers(draw):
    """A random layer of up to six operators and which of them are matched."""
    values = [Value(name="x", nbytes=draw(st.integers(1, 5))), Value(name="w", nbytes=1, held=True)]
    operators: list[Operator] = []
    for i in range(draw(st.integers(1, 6))):
        known = [value.name for value in values]
        inputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        outputs = [f"v{i}{part}" for part in "ab"[: draw(st.integers(1, 2))]]
        values += [Value(name=name, nbytes=draw(st.integers(1, 5))) for name in outputs]
        saves = draw(st.lists(st.sampled_from([*inputs, *outputs]), max_size=3, unique=True))
        kind = draw(st.sampled_from(["light", "light", "heavy", "comm"]))
        operators.append(
            Operator(
                path="",
                name=f"op{i}",
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                saves=tuple(saves),
                heavy=kind == "heavy",
                comm="all_reduce" if kind == "comm" else None,
            )
        )
    graph = Graph(values=tuple(values), operators=tuple(operators), input="x", output=operators[-1].outputs[0])
    matched = draw(st.sets(st.sampled_from(range(len(operators)))))
    return graph, matched
