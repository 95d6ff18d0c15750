"""What a user may pass to `apply`, and what the answer is when it makes no sense."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from tests.recompute.models import DEFAULT, FAMILIES, Block, toy
from torch import nn

from evenload import EvenloadError
from evenload.plan.policy import LayerPolicy, Policy, Recompute
from evenload.recompute import apply

torch.set_num_threads(1)


def policies(handle):
    return [state.policy for state in handle._states]


def test_patterns_for_all_layers():
    model, _ = toy()
    expected = [LayerPolicy(select=DEFAULT)] * 3
    for given in (list(DEFAULT), DEFAULT, iter(DEFAULT), LayerPolicy(select=DEFAULT)):
        with apply(model, given) as handle:
            assert policies(handle) == expected
    with apply(model, select=DEFAULT) as handle:
        assert policies(handle) == expected


def test_patterns_with_their_layers():
    model, _ = toy()
    with apply(model, {r"mlp\.mul": True, "norm": [0, 2], "silu": range(1, 2), "mlp": False}) as handle:
        assert [one.select for one in policies(handle)] == [
            (r"mlp\.mul", "norm"),
            (r"mlp\.mul", "silu"),
            (r"mlp\.mul", "norm"),
        ]


def test_a_policy_is_taken_layer_by_layer():
    model, forward = toy()
    policy = Policy.of_choices([Recompute.FULL, Recompute.NONE, Recompute.SELECT])
    with apply(model, policy) as handle:
        assert policies(handle) == [policy.for_layer(number) for number in range(3)]
        forward().backward()
        assert [dict(state.served) for state in handle._states] == [{"checkpoint": 1}, {"recorded": 1}, {"recorded": 1}]


def test_excluded_operators_stay_kept():
    model, forward = FAMILIES["llama"]()
    products = (r".*\..*\.matmul", r".*\.flash_attention")
    with apply(model, select=[".*"], exclude=products) as handle:
        forward()
        rerun = {call.func.overloadpacket.__name__ for call in handle._states[0].last.program.calls}
    assert not any("mm" in name or "attention" in name for name in rerun)
    assert "silu" in rerun


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["mlp\\.(mul"], r"\$\.policy\.select\[.*\]: pattern .* is no regular expression at character"),
        ("mlp", "the patterns are one text"),
        ({"mlp": "all"}, "'all' names no layers"),
        ({"mlp": 1}, "1 names no layers"),
        ({"mlp": [True]}, "True is no layer"),
        ({"mlp": [0, 7]}, r"\$\.policy\.select\['mlp'\]: the policy names layer 7, but the model has 3 layers"),
        ({"mlp": [-1]}, "names layer -1"),
        (Policy(full=frozenset({3})), r"\$\.policy\.full: the policy names layer 3"),
        ([1], "is no text"),
        (3, "3 is no policy"),
        (None, "None is no policy"),
        (["(a+)+b"], "can match in several ways"),
    ],
)
def test_a_policy_that_makes_no_sense(given, words):
    model, _ = toy()
    with pytest.raises(EvenloadError, match=words):
        apply(model, given)
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_switches_that_contradict_each_other():
    model, _ = toy()
    with pytest.raises(EvenloadError, match="given twice"):
        apply(model, ["mlp"], select=["norm"])
    with pytest.raises(EvenloadError, match=r"\$\.whole: .*keep some results"):
        apply(model, LayerPolicy(full=True, select_exclude=("mlp",)), whole="checkpoint")
    with pytest.raises(EvenloadError, match=r"\$\.policy\.slice_activation: .*no parameter"):
        apply(model, Policy(full=frozenset({0}), slice_activation=True))
    with pytest.raises(EvenloadError, match="slice of its input"):
        apply(model, Policy(full=frozenset({0}), slice_activation=True, mp_comm=False))
    with pytest.raises(EvenloadError, match="write auto, checkpoint or engine"):
        apply(model, ["mlp"], whole="twice")


@pytest.mark.parametrize("given", [3, "model", torch.relu, Block])
def test_what_is_no_module(given):
    with pytest.raises(EvenloadError, match="is no module"):
        apply(given, ["mlp"])


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (3, "3 is no path"),
        ([3], "3 is no path"),
        (["layers.0", "layers.0"], "are one layer"),
        (["layers", "layers.1.mlp"], r"'layers\.1\.mlp' lies in layer 'layers\.1'"),
    ],
)
def test_layers_that_make_no_sense(layers, words):
    model, _ = toy()
    with pytest.raises(EvenloadError, match=r"\$\.layers: .*" + words):
        apply(model, ["mlp"], layers=layers)


def test_a_part_or_the_whole_of_what_is_recomputed_already():
    model, _ = toy()
    with apply(model, ["mlp"]), pytest.raises(EvenloadError, match=r"'layers\.0\.mlp' is recomputed already, as part"):
        apply(model, ["mul"], layers="layers.0.mlp")
    with (
        apply(model, ["mul"], layers="layers.0.mlp"),
        pytest.raises(EvenloadError, match="recomputed already, as part"),
    ):
        apply(model, ["mlp"])
    apply(model, ["mlp"]).remove()


def test_layers_are_found_or_named():
    model, _ = toy()
    with apply(model, select=["mlp"]) as handle:
        assert [state.name for state in handle._states] == ["layers.0", "layers.1", "layers.2"]
    llama, _ = FAMILIES["llama"]()
    with apply(llama, select=["mlp"]) as handle:
        assert [state.name for state in handle._states] == [f"model.layers.{number}" for number in range(3)]
    with apply(llama.model.layers[0], select=["mlp"], layers="") as handle:
        assert [state.name for state in handle._states] == [""]
    with apply(model, select=["mlp"], layers=["layers.2", "layers.0"]) as handle:
        assert [state.name for state in handle._states] == ["layers.2", "layers.0"]
    named = nn.ModuleDict({"layers": nn.ModuleDict({"a": Block(), "b": Block()}), "head": nn.Linear(2, 2)})
    with apply(named, select=["mlp"]) as handle:
        assert [state.name for state in handle._states] == ["layers.a", "layers.b"]
    with apply(nn.Sequential(Block(), Block()), select=["mlp"]) as handle:
        assert [state.name for state in handle._states] == ["0", "1"]
    with apply(Block(), select=["mlp"]) as handle:
        assert [state.name for state in handle._states] == [""]


def test_layers_that_are_not_clear():
    both = nn.ModuleDict({"encoder": nn.ModuleList([Block(), Block()]), "decoder": nn.ModuleList([Block(), Block()])})
    with pytest.raises(EvenloadError, match="several modules hold repeated layers: 'encoder', 'decoder'"):
        apply(both, select=["mlp"])
    with apply(both, select=["mlp"], layers=["encoder", "decoder"]) as handle:
        assert len(handle._states) == 4
    with pytest.raises(EvenloadError, match=r"no module 'encodr'\n  fix: did you mean 'encoder'"):
        apply(both, select=["mlp"], layers="encodr")
    with pytest.raises(EvenloadError, match="no layer is named"):
        apply(both, select=["mlp"], layers=[])
    with pytest.raises(EvenloadError, match="3 is no path"):
        apply(both, select=["mlp"], layers=[3])


def test_removing_gives_the_layers_back_and_backward_may_come_later():
    from tests.recompute.measuring import gradients, same

    model, forward = toy()
    forward().backward()
    expected = gradients(model)
    model.zero_grad()
    handle = apply(model, select=DEFAULT)
    forward()
    loss = forward()
    handle.remove()
    handle.remove()
    assert not any("forward" in layer.__dict__ for layer in model.layers)
    loss.backward()
    assert same(gradients(model), expected)


def test_importing_evenload_does_not_import_torch():
    code = "import sys, evenload, evenload.recompute; assert 'torch' not in sys.modules; evenload.recompute.apply"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
