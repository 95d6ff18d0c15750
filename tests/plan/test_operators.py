from __future__ import annotations

import pytest
from tests.plan.graphs import llama

from evenload import EvenloadError
from evenload.plan.operators import Graph, Operator, Value
from evenload.units import MIB


def test_the_hand_written_llama_layer_keeps_what_a_trace_of_the_real_one_keeps():
    graph = llama()
    assert graph.kept_bytes / MIB == pytest.approx(92.64 - 0.5, abs=0.01)  # cos and sin are held by the model
    assert graph.kept_bytes == graph.total(graph.kept())


def test_eager_attention_keeps_the_probabilities_in_both_types():
    extra = llama(eager=True).kept_bytes - llama().kept_bytes
    assert extra / MIB == pytest.approx(256 + 128 - 0.125, abs=0.01)


def test_the_label_shows_module_operator_and_aten_name():
    labels = {operator.label for operator in llama().operators}
    assert {"mlp.gate_proj.linear.mm", "mlp.act_fn.silu", "add"} <= labels


def one_operator(operator: Operator, *values: Value, output: str = "y") -> Graph:
    return Graph(values=values, operators=(operator,), input="x", output=output)


X, Y = Value(name="x", nbytes=8), Value(name="y", nbytes=8)


def test_an_output_that_is_saved_beside_the_input_belongs_to_the_next_layer():
    relu = Operator(path="", name="relu", inputs=("x",), outputs=("y",), saves=("x", "y"))
    assert one_operator(relu, X, Y).kept() == ("x",)


def test_an_output_that_alone_is_saved_is_kept_here():
    relu = Operator(path="", name="relu", inputs=("x",), outputs=("y",), saves=("y",))
    assert one_operator(relu, X, Y).kept() == ("y",)


@pytest.mark.parametrize(
    ("operator", "values", "says"),
    [
        (Operator(path="a", name="b", inputs=("z",), outputs=("y",)), (X, Y), "unknown value 'z'"),
        (Operator(path="a", name="b", inputs=("x",), outputs=("y",)), (X, X, Y), "share a name"),
        (Operator(path="a", name="b", inputs=("x",), outputs=("x",)), (X, Y), "a second time"),
        (Operator(path="a", name="b", inputs=("y",), outputs=("y",)), (X, Y), "before anything makes it"),
        (Operator(path="a", name="b", inputs=("x",), saves=("y",)), (X, Y), "before anything makes it"),
        (Operator(path="a", name="b", inputs=("x",)), (X, Y), "no operator makes the graph's output"),
        (Operator(path="a", name="b"), (X,), "unknown value 'y'"),
        (Operator(path="a", name="b"), (X, Value(name="y", nbytes=-1)), "-1 bytes"),
    ],
)
def test_a_graph_that_contradicts_itself_is_refused(operator, values, says):
    with pytest.raises(EvenloadError, match=says):
        one_operator(operator, *values)


def test_an_operator_reads_the_whole_of_an_input_unless_it_says_which_part():
    half = Operator(path="", name="chunk", inputs=("x",), outputs=("y",), parts=(("x", 4),))
    graph = one_operator(half, X, Y)
    assert graph.operators[0].reads(X) == 4
    assert Operator(path="", name="f", inputs=("x",), outputs=("y",)).reads(X) == 8


@pytest.mark.parametrize("part", [("x", 9), ("x", -1), ("y", 4)])
def test_a_part_of_nothing_or_of_more_than_all_is_refused(part):
    with pytest.raises(EvenloadError, match="as a part of"):
        one_operator(Operator(path="", name="chunk", inputs=("x",), outputs=("y",), parts=(part,)), X, Y)
