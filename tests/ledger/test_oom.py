"""Out-of-memory messages in the words of many versions: the numbers, the reason, the advice."""

import pytest
from tests.ledger import oom_texts as texts

from evenload.errors import EvenloadError
from evenload.ledger.oom import read_oom, without_tips
from evenload.ledger.oom_reasons import explain
from evenload.ledger.settings import read_alloc_conf
from evenload.report.oom import as_json, as_text
from evenload.units import GIB, MIB


def one(text):
    [message] = read_oom(text)
    return message


def advice(text, conf=None):
    explanation = explain(one(text), None if conf is None else read_alloc_conf(conf))
    return explanation, [one.setting for one in explanation.advice if one.setting]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", "XLA's or TensorFlow's"),
        ("ResourceExhaustedError: Out of memory error on GPU 0.", "another framework's"),
        ("OutOfResources: out of resource: shared memory, Required: 180224, Hardware limit: 101376.", "Triton kernel"),
        ("ValueError: No available memory for the cache blocks.", "cache of keys and values"),
        ("failed (exitcode: -9) local_rank: 0", "killed from outside"),
        ("DataLoader worker (pid 4321) is killed by signal: Bus error.", "/dev/shm"),
        ("torch.OutOfMemoryError: CUDA out of memory", "no message with numbers"),
        ("room for all", "holds no out-of-memory message"),
    ],
)
def test_failures_that_cannot_be_read_are_called_what_they_are(text, says):
    with pytest.raises(EvenloadError, match=says):
        read_oom(text)


def test_what_the_new_wordings_say_is_read():
    assert one(texts.NPU_WORKSPACE).asked == round(2.51 * GIB)
    assert one(texts.RT_MALLOC).asked == GIB
    assert one(texts.NUMPY).asked == round(74.5 * GIB)
    assert (one(texts.PREFIXED).rank, one(texts.PREFIXED).asked) == (5, 2 * GIB)
    assert explain(one(texts.KERNEL)).facts[0] == "the host is full"
    assert "HCCL_BUFFSIZE" in explain(one(texts.ASCEND)).advice[0].text


@pytest.mark.parametrize("name", texts.ALL)
def test_every_wording_is_found_with_its_device(name):
    devices = {
        "TORCH_1_2": "cuda:1",
        "FRAGMENTED": "cuda:3",
        "NPU": "npu:2",
        "XPU": "xpu:0",
        "HIP": "hip",
        "MPS": "mps",
        "HOST": "cpu",
        "CUBLAS": "cuda",
        "DRIVER": "cuda",
        "MINDSPORE": "npu",
        "NPU_WORKSPACE": "npu:0",
        "ASCEND": "npu",
        "RT_MALLOC": "npu",
        "NCCL": "cuda",
        "NUMPY": "cpu",
        "KERNEL": "cpu",
        "SLURM": "cpu",
    }
    assert one(texts.ALL[name]).device == devices.get(name, "cuda:0")


def test_the_numbers_of_a_current_message_are_told_apart():
    message = one(texts.FRAGMENTED)
    assert message.rank == 3
    assert message.asked == 2 * GIB
    assert message.allocated == 60 * GIB
    assert message.private == GIB
    assert message.unallocated == round(17.5 * GIB)
    assert message.reserved == round(77.5 * GIB)
    assert message.outside == round(79.13 * GIB) - round(77.5 * GIB)
    assert message.elsewhere == 0  # what is left over is rounding
    assert message.tip == "expandable_segments:True"


def test_the_numbers_of_older_messages_mean_other_things():
    """`cached` was what no tensor used; `reserved in total` is that and the tensors."""
    assert one(texts.TORCH_1_2).unallocated == 256 * MIB
    assert one(texts.TORCH_1_13).unallocated == round(9.83 * GIB) - round(8.47 * GIB)
    assert one(texts.TORCH_1_13).unexplained == round(10.76 * GIB) - round(62.44 * MIB) - round(9.83 * GIB)
    assert one(texts.TORCH_2_1).capacity == round(79.15 * GIB)


def test_other_backends_and_allocators_are_read():
    assert one(texts.ASYNCHRONOUS).allocated == round(44.18 * GIB)
    assert one(texts.ASYNCHRONOUS).asked == 500 * MIB
    assert one(texts.MPS).allowed == round(18.13 * GIB)  # divided by 1024, and called GB
    assert one(texts.HOST).asked == 8 * GIB
    assert one(texts.MINDSPORE).asked == 33100113920
    assert one(texts.MINDSPORE).capacity == 32 * GIB


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("TORCH_1_2", "tensors"),
        ("TORCH_1_13", "fragmentation"),
        ("TORCH_2_1", "tensors"),
        ("FRAGMENTED", "fragmentation"),
        ("CONTAINER", "other processes"),
        ("LIMITED", "limit"),
        ("NO_DRIVER_COUNT", "outside PyTorch"),
        ("NPU", "tensors"),
        ("XPU", "free but refused"),
        ("HIP", "request too large"),
        ("ASYNCHRONOUS", "tensors"),
        ("MPS", "limit"),
        ("HOST", "tensors"),
        ("CUBLAS", "outside PyTorch"),
        ("DRIVER", "outside PyTorch"),
        ("MINDSPORE", "request too large"),
    ],
)
def test_every_message_has_its_reason(name, reason):
    explanation = explain(one(texts.ALL[name]))
    assert explanation.reason == reason
    assert explanation.facts
    assert explanation.advice


def test_numbers_that_cannot_be_are_not_believed():
    """Drivers that do not tell what a process holds report -1, which is printed as a huge number."""
    message = one(texts.NO_DRIVER_COUNT)
    assert (message.process, message.outside) == (None, None)
    assert message.unexplained == round(31.84 * GIB) - round(6.74 * GIB) - 24 * MIB


def test_this_process_is_found_behind_its_number_outside_a_container():
    message = one(texts.CONTAINER)
    assert (message.inferred, message.process) == (71, 15 * GIB)
    assert message.others == ((560, round(79.95 * GIB)),)
    assert any("process 71 is taken for this one" in fact for fact in explain(message).facts)


def test_a_setting_that_is_on_is_never_advised():
    """pytorch/pytorch#173049: the tip of the message was on already."""
    explanation, settings = advice(texts.FRAGMENTED, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert settings == []
    assert "the message recommends expandable_segments:True, which is on already" in explanation.facts
    assert not any("expandable_segments:True" in advice.text for advice in explanation.advice)
    for conf in ("max_split_size_mb:128", "max_split_size_mb:64,expandable_segments:True"):
        for text in texts.ALL.values():
            _, settings = advice(text, conf)
            assert not any(setting.partition(":")[0] in read_alloc_conf(conf).settings for setting in settings)


def test_the_setting_that_helps_is_advised_with_everything_that_is_on():
    explanation, settings = advice(
        texts.FRAGMENTED, "PYTORCH_ALLOC_CONF=roundup_power2_divisions:4,max_split_size_mb:64"
    )
    assert settings == ["expandable_segments:True"]
    assert explanation.advice[0].write == (
        'export PYTORCH_ALLOC_CONF="roundup_power2_divisions:4,expandable_segments:True"'
    )
    assert "takes the place of max_split_size_mb" in explanation.advice[0].text


def test_without_knowing_the_settings_the_advice_says_so():
    explanation, settings = advice(texts.FRAGMENTED)
    assert settings == ["expandable_segments:True"]
    assert "unless it is on already" in explanation.advice[0].text
    explanation, settings = advice(texts.FRAGMENTED, "PYTORCH_CUDA_ALLOC_CONF=")
    assert "unless it is on already" not in explanation.advice[0].text


def test_an_old_pytorch_is_advised_what_it_knows():
    assert advice(texts.TORCH_1_13)[1] == ["max_split_size_mb:128"]
    assert advice(texts.NPU)[1] == ["expandable_segments:True"]
    assert advice(texts.NPU)[0].advice[-1].write == 'export PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"'


def test_small_gaps_are_no_fragmentation_and_what_they_could_win_is_said():
    explanation = explain(one(texts.TORCH_1_2))
    assert explanation.reason == "tensors"
    assert "better use of gaps could win 256.00 MiB at most" in explanation.facts


def test_no_setting_is_advised_where_none_can_help():
    for name in ("TORCH_2_1", "HIP", "LIMITED", "CUBLAS", "HOST"):
        assert advice(texts.ALL[name])[1] == []
    assert "fragmentation is not it" in explain(one(texts.TORCH_2_1)).facts[1]
    assert advice(texts.FRAGMENTED, "backend:cudaMallocAsync")[1] == []


def test_a_whole_log_with_a_traceback_is_read():
    log = (
        "epoch 1\nTraceback (most recent call last):\n"
        '  File "/home/me/train.py", line 31, in main\n    loss = model(x)\n'
        '  File "/usr/lib/torch/nn/modules/linear.py", line 134, in forward\n    return F.linear()\n'
        f"{texts.FRAGMENTED}\nagain: {texts.FRAGMENTED}\n{texts.HOST}\n"
    )
    first, second = read_oom(log)
    assert (first.line, first.count, first.rank) == (7, 2, 3)
    assert first.source == "/home/me/train.py:31 main"
    assert second.allocator == "host"


def test_quoted_and_broken_lines_are_read():
    words = texts.FRAGMENTED.split()
    lines = [" ".join(words[at : at + 9]) for at in range(0, len(words), 9)]
    for prefix in ("# ", "> ", "  ", "[rank3]: "):
        text = "\n".join(prefix + line for line in lines)
        message = one(text)
        assert (message.asked, message.unallocated, message.device) == (2 * GIB, round(17.5 * GIB), "cuda:3"), prefix


def test_a_message_that_was_cut_off_says_what_it_can():
    message = one(texts.FRAGMENTED[:180])
    assert message.asked == 2 * GIB
    assert message.allocated is None
    assert explain(message).reason == "not said"


def test_tips_are_no_settings_that_are_on():
    assert "expandable_segments" not in without_tips(texts.FRAGMENTED)


def test_a_text_without_a_message_is_wrong_input():
    with pytest.raises(EvenloadError, match="holds no out-of-memory message"):
        read_oom("all is well")


def test_the_screen_and_json_show_the_same_numbers():
    conf = read_alloc_conf("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    explanations = [explain(one(texts.FRAGMENTED), conf)]
    text = as_text(explanations, conf)
    assert "line 1: cuda:3 on rank 3 had no room for 2.00 GiB" in text
    assert "17.50 GiB  held by PyTorch, used by no tensor" in text
    [said] = as_json(explanations, conf)["oom"]
    assert (said["unallocated"], said["reason"]) == (round(17.5 * GIB), "fragmentation")
    assert as_json(explanations, conf)["settings"] == {"expandable_segments": "True"}


def test_all_messages_can_be_shown():
    for text in texts.ALL.values():
        assert as_text([explain(one(text))], None)
