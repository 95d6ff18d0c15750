from __future__ import annotations

import json

import pytest

from evenload.errors import EvenloadError
from evenload.plan.operators import Operator
from evenload.profile.hardware import (
    ALIASES,
    PRESETS,
    Group,
    collective_time,
    communication_time,
    data_group,
    expert_group,
    find_hardware,
    operator_time,
    read_hardware,
    sent_bytes,
    transfer_time,
)
from evenload.setup import Setup

H100 = PRESETS["h100"]


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("H100", "h100"),
        ("a100", "a100-80"),
        ("A100_40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Ascend 910B", "ascend-910b"),
        ("910b", "ascend-910b"),
        ("b200", "b200"),
        ("H200", "h200"),
    ],
)
def test_devices_are_known_by_the_names_people_use(name, preset):
    assert find_hardware(name) is PRESETS[preset]


def test_every_other_spelling_leads_to_a_preset():
    assert set(ALIASES.values()) <= set(PRESETS)
    assert all(preset.name == name for name, preset in PRESETS.items())


def test_an_unknown_device_gets_a_suggestion():
    with pytest.raises(EvenloadError, match="did you mean 'h100'") as caught:
        find_hardware("h1000")
    assert "ascend-910b" in caught.value.fix
    assert caught.value.where == "$.hardware"


def test_every_preset_says_where_its_numbers_come_from_and_stays_below_its_label():
    label = {"a100-40": 40, "a100-80": 80, "h100": 80, "h200": 141, "b200": 180, "mi300x": 192, "ascend-910b": 64}
    for name, preset in PRESETS.items():
        assert "sheet" in preset.source or "Atlas" in preset.source
        assert 0.9 * label[name] * 2**30 < preset.memory < label[name] * 2**30
        assert 0 < preset.matmul_efficiency <= 1
        assert preset.network < preset.link < preset.bandwidth


def test_a_rate_that_a_device_lacks_is_an_error():
    with pytest.raises(EvenloadError, match="a100-80 has no fp8 matrix rate"):
        PRESETS["a100-80"].peak("fp8")


def test_a_device_may_be_given_as_a_preset_with_changes(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "H100", "name": "mine", "memory": "64GiB", "network": 25e9}))
    mine = find_hardware(str(path))
    assert (mine.name, mine.memory, mine.network) == ("mine", 64 * 2**30, 25e9)
    assert mine.flops == H100.flops
    assert mine.link == H100.link


def test_a_device_may_be_given_whole_as_yaml(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "memory: 32GB\nflops: {bf16: 1.0e+14}\nbandwidth: 1.0e+12\nlink: 1.0e+11\nnetwork: 1.0e+10\nnode: 4\n"
        "matmul_efficiency: 0.7\n"
    )
    mine = find_hardware(str(path))
    assert (mine.memory, mine.node, mine.memory_efficiency, mine.source) == (32 * 10**9, 4, 0.9, "given by the user")


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ([], "$"),
        ({}, "$"),
        ({"like": "h100", "memry": 1}, "$.memry"),
        ({"like": "h1000"}, "$.like"),
        ({"like": "mine.json"}, "$.like"),
        ({"like": "h100", "memory": True}, "$.memory"),
        ({"like": "h100", "memory": "much"}, "$.memory"),
        ({"like": "h100", "memory": 0}, "$.memory"),
        ({"like": "h100", "flops": 3}, "$.flops"),
        ({"like": "h100", "flops": {"fp4": 3}}, "$.flops.fp4"),
        ({"like": "h100", "flops": {"bf16": 0}}, "$.flops.bf16"),
        ({"like": "h100", "flops": {"bf16": "fast"}}, "$.flops.bf16"),
        ({"like": "h100", "bandwidth": 0}, "$.bandwidth"),
        ({"like": "h100", "matmul_efficiency": 1.5}, "$.matmul_efficiency"),
        ({"like": "h100", "node": 0}, "$.node"),
        ({"like": "h100", "node": 1.5}, "$.node"),
        ({"like": "h100", "latency": -1}, "$.latency"),
    ],
)
def test_a_wrong_device_is_an_error_with_its_path(data, where):
    with pytest.raises(EvenloadError) as caught:
        read_hardware(data, "mine.json")
    assert caught.value.where == f"mine.json: {where}"


def test_a_matrix_product_takes_its_operations_over_the_reached_rate():
    # [4096, 8192] x [8192, 8192] in bf16
    flops = 2 * 4096 * 8192 * 8192
    moved = 2 * (4096 * 8192 + 8192 * 8192 + 4096 * 8192)
    operator = Operator(path="mlp.up_proj", name="linear", flops=flops, moved=moved, heavy=True)
    expected = flops / (989.4e12 * 0.803)
    assert operator_time(operator, H100, Setup()) == pytest.approx(expected, rel=1e-12)
    assert moved / (3.35e12 * 0.9) < expected


def test_an_elementwise_operator_takes_the_bytes_it_moves():
    operator = Operator(path="mlp", name="mul", flops=4096 * 8192, moved=3 * 2 * 4096 * 8192)
    assert operator_time(operator, H100, Setup()) == pytest.approx(3 * 2 * 4096 * 8192 / (3.35e12 * 0.9), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "share"),
    [("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("all_to_all", 7 / 8), ("all_reduce", 14 / 8)],
)
def test_ring_collectives_send_their_share(kind, share):
    assert sent_bytes(kind, 800.0, 8) == 800 * share
    assert sent_bytes(kind, 800.0, 1) == 0


def test_a_collective_inside_a_node_runs_at_the_link():
    assert collective_time("all_reduce", 450e9, Group(size=8), H100) == pytest.approx(2e-5 + 1 / 0.8)
    assert collective_time("all_reduce", 450e9, Group(size=1), H100) == 0
    assert collective_time("all_reduce", 0, Group(size=8), H100) == 0


def test_a_ring_over_nodes_has_a_network_port_for_each_member_in_a_node():
    nbytes = 1e9
    eight_a_node = collective_time("all_gather", nbytes, Group(size=16), H100)
    one_a_node = collective_time("all_gather", nbytes, Group(size=16, stride=8), H100)
    assert eight_a_node == pytest.approx(2e-5 + nbytes / (8 * 50e9 * 0.8))
    assert one_a_node == pytest.approx(2e-5 + nbytes / (50e9 * 0.8))


def test_all_to_all_over_nodes_waits_for_the_network():
    # 7 of 15 partners are in the node
    expected = 2e-5 + 1e9 * (8 / 15) / (50e9 * 0.8)
    assert collective_time("all_to_all", 1e9, Group(size=16), H100) == pytest.approx(expected)


def test_groups_follow_the_order_of_ranks():
    setup = Setup(tp=4, cp=2, dp=4, ep=8)
    assert expert_group(setup) == Group(size=8, stride=4)
    assert data_group(setup) == Group(size=8, stride=4)
    assert data_group(setup).in_node(8) == 2


def test_expert_traffic_uses_the_expert_ranks_and_the_rest_the_tensor_ranks():
    setup = Setup(tp=2, dp=8, ep=16)
    swap = Operator(path="mlp.experts", name="all_to_all", comm="all_to_all", comm_bytes=1e8)
    gather = Operator(path="self_attn", name="all_gather", comm="all_gather", comm_bytes=1e8)
    assert communication_time(swap, H100, setup) > communication_time(gather, H100, setup)
    assert communication_time(gather, H100, setup) == pytest.approx(2e-5 + 1e8 / (450e9 * 0.8))
    assert operator_time(gather, H100, setup) == communication_time(gather, H100, setup)
    assert communication_time(Operator(path="", name="add"), H100, setup) == 0


def test_a_boundary_crosses_nodes_when_the_pipeline_does_not_fit_one():
    inside, across = Setup(pp=4, tp=2), Setup(pp=4, tp=4)
    assert transfer_time(1e8, H100, inside) == pytest.approx(2e-5 + 1e8 / (450e9 * 0.8))
    assert transfer_time(1e8, H100, across) == pytest.approx(2e-5 + 1e8 / (50e9 * 0.8))
    assert transfer_time(1e8, H100, Setup()) == 0
