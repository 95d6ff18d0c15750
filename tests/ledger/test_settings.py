"""Allocator settings: what the allocators would say, before a job runs. PyTorch itself is the judge where it can be."""

import random
import re

import pytest

from evenload.ledger.settings import read_alloc_conf
from evenload.ledger.settings_keys import CUDA_KEYS, MINDSPORE_KEYS, NPU_KEYS

RIGHT = [
    "",
    "expandable_segments:True",
    " expandable_segments : True , large_segment_size_mb : 32 ",
    "expandable_segments:True,large_segment_size_mb:11,",
    "max_split_size_mb:20",
    "max_split_size_mb:64,large_segment_size_mb:64",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[256:0]",
    "garbage_collection_threshold:0.8",
    "pinned_use_background_threads:False",
    "max_non_split_rounding_mb:20",
    "max_split_size_mb:64MB",
    "max_split_size_mb:-5",
    "expandable_segments:True,expandable_segments:False",
]
WRONG = [
    "max_split_size_mb:10",
    "max_split_size_mb:abc",
    "max_split_size_mb:1e3",
    "max_split_size_mb",
    "max_split_size_mb:30,large_segment_size_mb:64",
    "large_segment_size_mb:64,max_split_size_mb:30",
    "expandable_segments:true",
    "expandable_segments:1",
    "expandable_segments=True",
    "expandable_segments:True;max_split_size_mb:64",
    "expandable_segments",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1",
    "garbage_collection_threshold:80%",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[300:1]",
    "roundup_power2_divisions:[256:1,512:3]",
    "roundup_power2_divisions:[256:1,512:2",
    "large_segment_size_mb:10",
    "max_non_split_rounding_mb:5",
]


def facts(text, **more):
    return [str(notice) for notice in read_alloc_conf(text, **more).notices]


def torch_accepts(text):
    import torch

    set_settings = torch._C._accelerator_setAllocatorSettings
    try:
        set_settings(text)
    except (RuntimeError, ValueError):
        return False
    finally:
        set_settings("large_segment_size_mb:20,max_non_split_rounding_mb:20")
    return True


@pytest.mark.parametrize("text", RIGHT + WRONG)
def test_a_text_is_accepted_exactly_where_pytorch_starts_with_it(text):
    assert read_alloc_conf(text, variable="PYTORCH_ALLOC_CONF").accepted == torch_accepts(text) == (text in RIGHT)


def test_random_texts_are_accepted_exactly_where_pytorch_starts_with_them():
    rng = random.Random(0)
    parts = [text for text in RIGHT + WRONG if re.fullmatch(r"\w+:([^=;,[]*|\[.*\])", text)]
    for _ in range(300):
        text = ",".join(rng.sample(parts, k=rng.randint(1, 3)))
        if text.count("max_split_size_mb") > 1:  # PyTorch compares every one of them with the size of segments
            continue
        assert read_alloc_conf(text, variable="PYTORCH_ALLOC_CONF").accepted == torch_accepts(text), text


def test_a_colon_belongs_between_a_setting_and_its_value():
    conf = read_alloc_conf("PYTORCH_CUDA_ALLOC_CONF=expandable_segments=True")
    assert conf.variable == "PYTORCH_CUDA_ALLOC_CONF"
    assert conf.on("expandable_segments")
    assert [str(notice) for notice in conf.notices] == [
        (
            "PYTORCH_CUDA_ALLOC_CONF:44: `=` stands between 'expandable_segments' and its value, where `:` belongs, "
            "and PyTorch stops at it\n  fix: write expandable_segments:True"
        )
    ]


@pytest.mark.parametrize("keys", [CUDA_KEYS, NPU_KEYS, MINDSPORE_KEYS])
def test_every_known_setting_is_known_and_a_misspelt_one_gets_a_suggestion(keys):
    variable = {id(CUDA_KEYS): "PYTORCH_ALLOC_CONF", id(NPU_KEYS): "PYTORCH_NPU_ALLOC_CONF"}.get(
        id(keys), "MS_ALLOC_CONF"
    )
    for key in keys:
        assert not any("knows no setting" in fact for fact in facts(f"{key}:1", variable=variable))
        wrong = f"{key[:4]}{key[5:]}"
        [fact, *_] = facts(f"{wrong}:1", variable=variable)
        assert "knows no setting" in fact
        assert "did you mean" in fact


def test_a_setting_of_another_allocator_is_sent_there():
    [fact] = facts("memory_tracker:True", variable="PYTORCH_CUDA_ALLOC_CONF")
    assert "it belongs into MS_ALLOC_CONF" in fact
    [fact] = facts("expandable_segments:True", variable="MS_ALLOC_CONF")
    assert "it belongs into PYTORCH_CUDA_ALLOC_CONF" in fact


def test_the_variable_is_guessed_from_the_settings():
    assert read_alloc_conf("enable_vmm:True").variable == "MS_ALLOC_CONF"
    assert read_alloc_conf("page_size:1g").variable == "PYTORCH_NPU_ALLOC_CONF"
    assert read_alloc_conf("expandable_segments:True").variable == "PYTORCH_ALLOC_CONF"
    assert read_alloc_conf("export MS_ALLOC_CONF='enable_vmm:True'").settings == {"enable_vmm": "True"}


def test_mindspore_takes_commas_and_semicolons_and_drops_the_rest_without_a_word():
    conf = read_alloc_conf("enable_vmm:True; memory_tracker:true ,vmm_align_size:2", variable="MS_ALLOC_CONF")
    assert (conf.notices, conf.accepted) == ((), True)
    assert conf.on("memory_tracker")
    conf = read_alloc_conf("enable_vmm=True,memory_trackr:True,memory_tracker:TRUE", variable="MS_ALLOC_CONF")
    assert conf.accepted
    assert [notice.fix for notice in conf.notices] == [
        "write enable_vmm:True",
        "did you mean 'memory_tracker'?",
        "write memory_tracker:True",
    ]
    assert all("MindSpore drops it silently" in notice.fact for notice in conf.notices)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("expandable_segments:True,expandable_segments:False", "given twice"),
        ("backend:cudaMallocAsync,max_split_size_mb:64", "max_split_size_mb has no effect"),
        ("backend:cudaMallocAsync,expandable_segments:True", "expandable_segments has no effect"),
        ("backend:native,backend:cudamallocasync", "did you mean 'cudaMallocAsync'?"),
        ("expandable_segments:True,max_split_size_mb:64", "work against each other"),
        ("expandable_segments:True,garbage_collection_threshold:0.8", "no effect on segments that expand"),
        ("garbage_collection_threshold:0.8", "while that is not limited"),
        ("pinned_num_register_threads:8", "without pinned_use_cuda_host_register:True"),
        ("pinned_use_cuda_host_register:True,pinned_num_register_threads:6", "not a power of two"),
        ("per_process_memory_fraction:90", "write 0.9"),
        ("garbage_collection_threshold:80%", "write 0.8"),
        ("max_split_size_mb:64MB", "is read as 64"),
        ("max_split_size_mb:99999999999999999999", "larger than any memory"),
        ("max_split_size_mb:", "has no value"),
        ("'expandable_segments:True'", "quotation mark"),
        ("expandable_segments:True,,large_segment_size_mb:32", "no setting stands before this comma"),
        (",expandable_segments:True", "no setting stands before this comma"),
        ("expandable_segments:yes", "write expandable_segments:True"),
        ("expandable_segments:maybe", "write expandable_segments:True or False"),
        ("expandable_segments_reserve:12GB", "ignored"),
        ("roundup_power2_divisions:[>:3]", "'3' divisions"),
        ("PYTORCH_NPU_ALLOC_CONF=expandable_segments:True,max_split_size_mb:64", "torch_npu refuses max_split_size_mb"),
        ("PYTORCH_NPU_ALLOC_CONF=base_addr_aligned_kb:16", "no effect without expandable_segments:True"),
        ("PYTORCH_NPU_ALLOC_CONF=page_size:2g", "is not 1g"),
        ("PYTORCH_NPU_ALLOC_CONF=segment_size_mb:40,page_size:1g,expandable_segments:True", "beside page_size"),
        ("MS_ALLOC_CONF=simple_tracker:True", "without memory_tracker:True"),
        ("MS_ALLOC_CONF=enable_vmm:False,vmm_align_size:2", "with enable_vmm:False"),
        ("MS_ALLOC_CONF=vmm_align_size:0", "out of range"),
    ],
)
def test_what_is_pointless_or_forbidden_is_said(text, says):
    assert any(says in fact for fact in facts(text)), facts(text)


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True",
        "backend:cudaMallocAsync",
        "max_split_size_mb:128,roundup_power2_divisions:8",
        "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9",
        "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True,base_addr_aligned_kb:0",
        "MS_ALLOC_CONF=memory_tracker:True,memory_tracker_path:/tmp/here,simple_tracker:true",
        "MS_ALLOC_CONF=enable_vmm:True",
        "max_split_size_mb:$SPLIT",
        "$OTHERS,expandable_segments:True",
    ],
)
def test_good_settings_are_left_alone(text):
    assert facts(text) == []


def test_the_last_of_duplicates_counts():
    assert read_alloc_conf("max_split_size_mb:64,max_split_size_mb:128").settings == {"max_split_size_mb": "128"}
