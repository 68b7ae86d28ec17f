"""What is done differently on CUDA, on a device that only says it is one."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

import zoo
from equality import BRIEF, differences
from outcore.decode import loader
from outcore.engine import model_profile
from outcore.engine import streamed_layers as weights
from outcore.errors import BudgetError


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_profile, "on_cuda", lambda: True)


@pytest.mark.parametrize(("model_type", "quantize"), [("llama", None), ("qwen3_moe", {"group_size": 64, "bits": 4})])
def test_weights_that_are_copied_to_the_device_first_give_the_same_bits(
    model_type: str, quantize: dict[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: None
) -> None:
    monkeypatch.setattr(weights, "COPY_ROWS", 2)
    monkeypatch.setattr(model_profile, "COPY_ROWS", 2)
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", quantize=quantize)
    found, (none_resident, *_) = differences(folder, holdings=BRIEF)
    assert not found
    assert none_resident.streaming is not None and none_resident.streaming.layers.weights.copies


def smallest(folder: Path, **options: int) -> int:
    with pytest.raises(BudgetError) as caught:
        loader.prepare(folder, memory=1000, **options)
    assert caught.value.smallest is not None
    return caught.value.smallest


def test_a_plan_counts_workspace_and_the_copies_of_a_long_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    options = {"context": 300, "prompt": 200}
    elsewhere = smallest(folder, **options)
    monkeypatch.setattr(model_profile, "on_cuda", lambda: True)
    assert smallest(folder, **options) >= elsewhere + model_profile.CUDA_WORKSPACE

    def activations() -> int:
        return loader.prepare(folder, memory="1GB", resident=0, **options).plan.activation_bytes

    copied = activations()
    largest = max(x.slot for x in loader.prepare(folder, memory="1GB", **options).profile.size.layers)
    monkeypatch.setattr(model_profile, "COPY_ROWS", 201)
    assert copied == activations() + 2 * largest, "two are there at once"


def test_weights_are_copied_for_several_sequences_and_only_where_memory_is_planned_for_it(
    tmp_path: Path, cuda: None
) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")

    def copied(x: mx.array, **options: int) -> bool:
        model, _ = loader.load_model(folder, memory="2GB", resident=0, **options)
        with model.outcore as session:
            views, again = (session.streaming.layers.weights.of(0, 0, (x,)) for _ in range(2))
            return all(a is not b for a, b in zip(views, again, strict=True))

    one, many = mx.zeros((1, 3, 64)), mx.zeros((3, 1, 64))
    assert copied(many, context=300, prompt=200)
    assert not copied(one, context=300, prompt=200)
    assert not copied(many, context=300, prompt=8)
    assert copied(mx.zeros((1, 128, 64)), context=300, prompt=200)


def test_workspace_is_there_once_and_not_for_each_token_or_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")

    def counted(**options: int) -> int:
        plan = loader.prepare(folder, memory="1GB", resident=0, context=300, prompt=100, draft="ngram", **options).plan
        return plan.activation_bytes

    def drafted() -> int:
        return loader.prepare(folder, memory="1GB", resident=0, context=300, draft="ngram").profile.size.drafted

    one, tokens = counted(), drafted()
    monkeypatch.setattr(model_profile, "on_cuda", lambda: True)
    assert drafted() == tokens == 32
    assert counted() - one < 1.1 * model_profile.CUDA_WORKSPACE


def test_a_token_of_a_chunk_counts_for_all_that_a_graph_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: None
) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")

    def token() -> int:
        return loader.prepare(folder, memory="2GB", context=300, prompt=200).profile.size.token

    few = token()
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "100")
    many = token()
    hidden = loader.prepare(folder, memory="2GB").profile.lazy.config["hidden_size"]
    assert many == 100 * model_profile.CUDA_OPERATION * hidden * 4 and many > few, "float32"
    monkeypatch.delenv("MLX_MAX_OPS_PER_BUFFER")
    monkeypatch.setattr(mx, "device_info", lambda *_: {"architecture": "sm_90"})
    assert token() == many
