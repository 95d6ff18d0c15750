from __future__ import annotations

import pytest
import torch
from tests.recompute import blocks
from tests.recompute.measuring import allocated
from tests.recompute.models import DEFAULT, FAMILIES, toy

from evenload.plan.policy import LayerPolicy, Policy
from evenload.recompute import apply

torch.set_num_threads(1)


def test_a_report_names_operators_bytes_and_what_is_kept_instead():
    model, forward = FAMILIES["llama"](dtype=torch.bfloat16)
    with apply(model, select=[*DEFAULT, ".*norm"]) as handle:
        assert str(handle.report()).startswith("LlamaDecoderLayer, 3 layers (0-2): not run yet")
        forward()
        forward()
        (kind,) = handle.report().kinds
    tokens = 2 * 32
    product, activation, norms = kind.patterns
    assert [(hit.operator, hit.count, hit.nbytes) for hit in product.hits] == [("mlp.mul", 1, tokens * 176 * 2)]
    assert [hit.operator for hit in activation.hits] == ["mlp.act_fn.silu"]
    names = {hit.operator: (hit.count, hit.nbytes) for hit in norms.hits}
    assert names["input_layernorm.to._to_copy"] == (2, tokens * 64 * (4 + 2))
    assert names["post_attention_layernorm.rsqrt"] == (1, tokens * 4)
    assert kind.kept_instead == {"input": tokens * 64 * 2, "add": tokens * 64 * 2}
    assert kind.freed == product.dropped + activation.dropped + norms.dropped - sum(kind.kept_instead.values())
    assert kind.path == "hooks"
    assert dict(kind.served) == {"recorded": 1, "compared": 2, "hooks": 3}
    assert kind.layers == ("model.layers.0", "model.layers.1", "model.layers.2")
    text = str(kind)
    assert "frees 92.50 KiB, 52 %" in text
    assert "    mlp.mul  22.00 KiB" in text
    assert "kept instead: input 8.00 KiB, add 8.00 KiB" in text
    assert "followed by hooks; forwards so far: 1 recorded, 2 compared, 3 hooks" in text


def test_declined_and_unmatched_patterns_say_why():
    model, forward = FAMILIES["llama"](attn_implementation="eager")
    with apply(model, select=[r"self_attn\.softmax", r"mlp\.mull", r"self_attn\.neg", "mlp.mul"]) as handle:
        forward()
        softmax, misspelt, negative, dotted = handle.report().kinds[0].patterns
    assert softmax.declined.startswith("saves nothing: self_attn.softmax._softmax keeps its own result")
    assert not misspelt.hits
    assert r"mlp\.mul" in misspelt.nearest
    assert negative.declined == "backward needs nothing of what it makes"
    assert "backslash" in dotted.nearest
    assert "matches nothing" in str(handle.report())


def test_layers_that_do_the_same_are_one_kind():
    model, forward = FAMILIES["deepseek v3"]()
    policy = Policy(full=frozenset({2}), select={"mlp": frozenset({0, 1})})
    with apply(model, policy) as handle:
        forward()
        kinds = handle.report().kinds
    assert [(kind.numbers, kind.path) for kind in kinds] == [({0}, "hooks"), ({1}, "hooks"), ({2}, "checkpoint")]
    assert "run again as a whole in backward, by torch.utils.checkpoint" in str(kinds[2])


def test_what_several_layers_keep_together_counts_once():
    model, forward = FAMILIES["llama"](attn_implementation="eager")
    plain = allocated(forward)[0]
    with apply(model, select=["self_attn"]) as handle:
        forward()
        report = handle.report()
        assert any(name.startswith("argument") for name in report.kinds[0].kept_instead)
        assert report.shared == 2 * 2 * 32 * 32 * 4  # the mask, twice too often
        assert plain - allocated(forward)[0] == report.freed


def test_what_a_layer_returns_and_the_next_one_starts_from_counts_once():
    class Last(blocks.Ends):
        def forward(self, x):
            return self.middle(self.b(self.a(x.double().sin().to(x.dtype)))).tanh()

        def middle(self, y):
            return y.exp()

    model, forward = toy(Last)
    plain = allocated(forward)[0]
    with apply(model, select=["cast", "exp"]) as handle:
        forward()
        assert "input" in handle.report().kinds[-1].kept_instead
        assert plain - allocated(forward)[0] == handle.report().freed


def test_a_graph_of_every_layer_for_a_profile():
    model, forward = toy()
    with apply(model, select=DEFAULT) as handle:
        assert handle.graphs() == {}
        forward()
        graphs = handle.graphs()
    assert list(graphs) == ["layers.0", "layers.1", "layers.2"]
    graph = graphs["layers.0"]
    product = next(one for one in graph.operators if one.label == "mlp.gate_proj.linear.mm")
    assert product.flops == 2 * 32 * 32 * 88
    assert product.heavy
    assert product.weight_bytes == 32 * 88 * 4
    assert graph.kept_bytes == handle.report().kinds[0].before


@pytest.mark.parametrize("make", [toy, FAMILIES["llama"], FAMILIES["deepseek v2"]])
def test_all_bytes_that_a_layer_keeps_are_accounted_for(make):
    """Not only the difference: what one more layer keeps is what the graph says."""
    model, forward = make()
    with apply(model, LayerPolicy(select=("nothing",))) as handle:
        forward()
        before = allocated(forward)[0]
        report = handle.report()
        assert report.freed == 0
        layer_bytes = report.kinds[-1].before
        holder = model.model.layers if hasattr(model, "model") else model.layers
        last = holder[-1]
        del holder[-1]
        if hasattr(model, "config"):
            model.config.num_hidden_layers -= 1
        numbers = 8  # a number in the code is saved as a tensor of its own, which hooks do not see
        assert layer_bytes <= before - allocated(forward)[0] <= layer_bytes + numbers
        assert last is not None


def test_a_policy_report_can_be_made_from_fake_tensors_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, forward = toy()
        with apply(model, select=DEFAULT) as handle:
            forward()
            fake = handle.report()
    model, forward = toy()
    with apply(model, select=DEFAULT) as handle:
        forward()
        real = handle.report()
    assert fake == real


def test_an_empty_policy_changes_nothing():
    model, forward = toy()
    plain = allocated(forward)[0]
    with apply(model, Policy()) as handle:
        for _ in range(2):
            assert allocated(forward)[0] == plain
        assert handle.report().freed == 0
