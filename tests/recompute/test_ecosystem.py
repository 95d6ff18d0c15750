"""Plain loops, transformers.Trainer, accelerate and PEFT: recomputation changes bytes, and nothing else."""

from __future__ import annotations

import pytest
import torch
from tests.recompute.measuring import Operators, allocated, same
from tests.recompute.models import DEFAULT, FAMILIES

from evenload import EvenloadError
from evenload.recompute import apply

torch.set_num_threads(1)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def batches(count: int):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 128, (2, 32), generator=generator) for _ in range(count)]


def test_a_plain_loop_trains_the_same_weights_with_fewer_bytes():
    trained, kept = {}, {}
    for recomputed in (False, True):
        model, _ = FAMILIES["llama"]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        handle = apply(model, select=DEFAULT) if recomputed else None
        for ids in batches(4):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        del loss
        trained[recomputed] = weights(model)
        kept[recomputed] = allocated(lambda ids=ids, model=model: model(input_ids=ids, labels=ids).loss)[0]
        if handle is not None:
            freed = handle.report().freed
    assert same(trained[True], trained[False])
    assert kept[False] - kept[True] == freed > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_of_transformers(tmp_path, accumulation):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    trained = {}
    for recomputed in (False, True):
        model, _ = FAMILIES["llama"]()
        data = [{"input_ids": ids[0], "labels": ids[0]} for ids in batches(8)]
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        handle = apply(model, select=DEFAULT) if recomputed else None
        Trainer(model=model, args=arguments, train_dataset=data).train()
        trained[recomputed] = weights(model)
        if handle is not None:
            (kind,) = handle.report().kinds
            assert dict(kind.served) == {"recorded": 1, "compared": 2, "hooks": 3 * (2 * accumulation - 1)}
            assert kind.freed == 2 * 2 * 32 * 176 * 4
    assert same(trained[True], trained[False])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_with_gradient_checkpointing_on_gets_a_fix(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model, _ = FAMILIES["llama"]()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        gradient_checkpointing=True,
        max_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": ids[0], "labels": ids[0]} for ids in batches(2)]
    with apply(model, select=DEFAULT), pytest.raises(EvenloadError, match="switch checkpointing off"):
        Trainer(model=model, args=arguments, train_dataset=data).train()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["apply", "prepare"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(first, precision):
    accelerate = pytest.importorskip("accelerate")
    trained = {}
    for recomputed in (False, True):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model, _ = FAMILIES["llama"]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if recomputed and first == "apply":
            handle = apply(model, select=DEFAULT)
        model, optimizer = accelerator.prepare(model, optimizer)
        if recomputed and first == "prepare":
            handle = apply(model, select=DEFAULT)
        for ids in batches(3):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
        trained[recomputed] = weights(accelerator.unwrap_model(model))
    assert same(trained[True], trained[False])
    assert dict(handle.report().kinds[0].served) == {"recorded": 1, "compared": 2, "hooks": 6}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", ["apply", "adapters"])
def test_adapters_of_peft_on_frozen_layers(first):
    peft = pytest.importorskip("peft")
    trained, kept = {}, {}
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], lora_dropout=0.1)
    for recomputed in (False, True):
        model, _ = FAMILIES["llama"]()
        torch.manual_seed(0)
        if recomputed and first == "apply":
            handle = apply(model, select=[*DEFAULT, ".*norm"])
        adapted = peft.get_peft_model(model, settings)
        if recomputed and first == "adapters":
            handle = apply(adapted, select=[*DEFAULT, ".*norm"])
        chosen = [one for one in adapted.parameters() if one.requires_grad]
        assert len(chosen) < len(list(adapted.parameters()))
        optimizer = torch.optim.AdamW(chosen, lr=1e-2)
        torch.manual_seed(5)
        for ids in batches(3):
            loss = adapted(input_ids=ids, labels=ids).loss
            with Operators() as seen:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
        trained[recomputed] = weights(adapted)
        kept[recomputed] = allocated(lambda ids=ids, adapted=adapted: adapted(input_ids=ids, labels=ids).loss)[0]
    assert same(trained[True], trained[False])
    assert kept[False] - kept[True] == handle.report().freed > 0
    assert seen.counts["silu"] == 3


def test_the_recorder_sees_what_recomputation_keeps_and_runs_again():
    import evenload
    from evenload.ledger.curve import by_category, live, peaks

    sizes = {}
    for recomputed in (False, True):
        model, forward = FAMILIES["llama"]()
        handle = apply(model, select=DEFAULT) if recomputed else None
        forward().backward()
        with evenload.record(model=model) as recording:
            forward().backward()
        ledger = recording.ledger
        at_peak = by_category(ledger, live(ledger, peaks(ledger).at))
        sizes[recomputed] = {category.value: nbytes for category, nbytes in at_peak.items()}
        if handle is not None:
            served = dict(handle.report().kinds[0].served)
            assert served == {"recorded": 1, "compared": 5}  # the recorder's own hooks might change what a layer does
            freed = handle.report().freed
    assert sizes[False]["activation"] - sizes[True]["activation"] > 0.5 * freed
