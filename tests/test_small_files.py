"""Files beside the weights that are no files, have no end, or say nonsense: one typed line each, at once."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache, save_prompt_cache

import outcore
import zoo
from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.manifest import is_packed, read_manifest
from outcore.checkpoint.packed_store import open_model
from outcore.checkpoint.prompt_cache import open_prompt_cache
from outcore.cli.main import main
from outcore.decode.loader import load_model
from outcore.decode.preparation import prepare
from outcore.errors import (
    BudgetError,
    CheckpointError,
    MissingFileError,
    OutcoreError,
    StoreError,
    UnsupportedModelError,
    UsageError,
)
from outcore.machine.small_files import parse_json, read_small
from outcore.modules.cache_check import check_cache
from outcore.modules.cache_form import forms_of
from outcore_drafts.draft_model import check_tokenizers
from test_pack import refusal
from test_random_state import adapter


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"model_type": "llama", "x": "')
        file.truncate(10 << 30)  # sparse


ODD: dict[str, Callable[[Path], None]] = {"pipe": pipe, "endless": endless, "huge": huge}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return zoo.save_checkpoint("llama", tmp_path / "m")


def replace(path: Path, odd: str) -> None:
    path.unlink(missing_ok=True)
    ODD[odd](path)


@pytest.fixture(autouse=True)
def at_once() -> Any:
    began = time.perf_counter()
    yield
    assert time.perf_counter() - began < 60


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "generation_config.json", "hf_quant_config.json"]
)
def test_a_configuration_without_end_is_refused_before_it_is_read(llama: Path, name: str, odd: str) -> None:
    replace(llama / name, odd)
    said = refusal(CheckpointError, open_model, llama)
    assert name in said and ("not a regular file" in said or "more than the" in said)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"])
def test_a_tokenizer_without_end_is_refused_before_it_is_read(
    quick_models: Callable[[int], Path], tmp_path: Path, name: str, odd: str
) -> None:
    folder = shutil.copytree(quick_models(2), tmp_path / "m")
    replace(folder / name, odd)
    assert name in refusal(CheckpointError, outcore.load, str(folder))
    if name == "tokenizer.json":
        with pytest.raises(CheckpointError, match=name):
            check_tokenizers(quick_models(2), folder)


def test_files_that_are_not_opened_may_hold_anything(llama: Path) -> None:
    huge(llama / "train.jsonl")
    huge(llama / "notes.txt")
    pipe(llama / "results.json")
    assert open_model(llama).origins


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_an_adapter_without_end_is_refused_before_it_is_read(llama: Path, tmp_path: Path, name: str, odd: str) -> None:
    there = adapter(llama, tmp_path / "adapter")
    replace(there / name, odd)
    with pytest.raises(CheckpointError, match=name):
        prepare(llama, memory="1GB", adapter_path=str(there))


@pytest.mark.parametrize("odd", ODD)
def test_a_manifest_without_end_is_none(tmp_path: Path, odd: str) -> None:
    replace(tmp_path / "manifest.json", odd)
    assert not is_packed(tmp_path)
    refusal(StoreError, read_manifest, tmp_path / "manifest.json")


def test_a_file_that_grows_while_it_is_read_is_not_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(100))
    assert read_small(path, 100) == bytes(100)
    fstat = os.fstat

    def grow(fd: int) -> os.stat_result:
        status = fstat(fd)
        with path.open("ab") as file:
            file.write(bytes(1000))
        return status

    monkeypatch.setattr(os, "fstat", grow)
    with pytest.raises(OSError, match="more than the 100 B"):
        read_small(path, 100)


def test_opening_a_pipe_that_somebody_writes_to_does_not_read_from_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    os.mkfifo(path)
    holder = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(OSError, match="not a regular file"):
            read_small(path, 100)
    finally:
        os.close(holder)


NESTED = "[" * 200_000


@pytest.mark.parametrize("text", [NESTED, '{"a":' * 100_000, "9" * 5000, "{", "\xff", ""])
def test_json_that_cannot_be_read_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text.encode("latin-1"))


def test_names_that_come_twice_are_refused_where_the_last_must_not_count(llama: Path) -> None:
    assert parse_json(b'{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="'a' twice"):
        parse_json(b'[{"a": 1, "a": 2}]', twins=False)
    path = llama / "model.safetensors.index.json"
    name = next(iter(json.loads(path.read_text())["weight_map"]))
    path.write_text(path.read_text().replace('"weight_map": {', f'"weight_map": {{"{name}": "elsewhere.safetensors",'))
    assert f"'{name}' twice" in refusal(CheckpointError, open_checkpoint, llama)


# Configurations

NONSENSE: list[tuple[str, Any]] = [
    ("num_attention_heads", 0), ("num_attention_heads", -1), ("num_attention_heads", 3), ("num_attention_heads", "4"),
    ("num_attention_heads", 10**30), ("num_attention_heads", None), ("num_attention_heads", []),
    ("num_key_value_heads", 0), ("num_hidden_layers", 10**9), ("num_hidden_layers", -1), ("num_hidden_layers", 1.5),
    ("num_hidden_layers", 10**400), ("hidden_size", 0), ("hidden_size", 2**31), ("hidden_size", {}),
    ("vocab_size", 10**12), ("vocab_size", None), ("rms_norm_eps", "x"), ("rms_norm_eps", None),
    ("quantization", {"bits": 0, "group_size": 0}), ("quantization", 5), ("quantization", {}),
    ("quantization_config", {"quant_method": []}), ("quantization_config", 7), ("rope_scaling", {"type": "linear"}),
    ("rope_scaling", 3), ("text_config", 5), ("text_config", []), ("model_type", None), ("model_type", 5),
    ("model_type", "../x"), ("model_file", 5), ("model_file", "../x.py"), ("head_dim", 0), ("head_dim", 10**6),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NONSENSE)
def test_nonsense_in_a_configuration_is_one_typed_line_or_no_matter(llama: Path, name: str, value: Any) -> None:
    path = llama / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    try:
        prepare(llama, memory="1GB")
    except OutcoreError as e:
        assert str(e).isprintable() and len(str(e)) < 600, str(e)
        assert isinstance(e, CheckpointError | BudgetError)
        refused = True
    else:
        refused = False
    # What a llama needs cannot be missing; what it does not look at may be anything (its layers have a list of types).
    unread = ("text_config", "quantization_config", "rms_norm_eps", "rope_scaling", "quantization")
    assert refused or name in unread or (name, value) in [("num_hidden_layers", -1), ("num_hidden_layers", 1.5)]


def test_zero_heads_are_one_line_on_the_command_line(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = llama / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 0}))
    assert main(["info", str(llama)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(llama) in said


def test_a_model_that_cannot_run_at_all_is_refused_when_it_is_opened(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models import llama as module

    def fails(*_: Any, **__: Any) -> Any:
        raise LookupError("nothing\nfits")

    monkeypatch.setattr(module.TransformerBlock, "__call__", fails)
    assert "nothing fits" in refusal(UnsupportedModelError, lambda: prepare(llama, memory="1GB"))


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "{", "9" * 5000, NESTED, "\xff"])
def test_a_generation_config_that_is_none_is_no_traceback(llama: Path, text: str) -> None:
    (llama / "generation_config.json").write_text(text, encoding="latin-1")
    try:
        prepare(llama, memory="1GB")  # mlx-lm passes over what is no JSON
    except CheckpointError as e:
        assert str(e).isprintable()


# Prompt caches


def saved(path: Path, model: Any, about: dict[str, str], tokens: int = 5) -> Path:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([list(range(1, tokens + 1))]), cache=cache))
    save_prompt_cache(str(path), cache, about)
    return path


def test_a_prompt_cache_is_what_mlx_lm_saved(llama: Path, tmp_path: Path) -> None:
    model, _ = load_model(llama, memory="1GB")
    with model.outcore:
        about = {"model": "m", "tokenizer_config": json.dumps({"trust_remote_code": False, "eos_token": "</s>"})}
        cache, settings, made_with = open_prompt_cache(saved(tmp_path / "c.safetensors", model, about), "m")
        check_cache(forms_of(make_prompt_cache(model)), cache)
        assert settings == {"trust_remote_code": False, "eos_token": "</s>"} and made_with == "m"
        assert [c.offset for c in cache] == [5] * len(cache)
        with pytest.raises(UsageError, match="another model"):
            check_cache(forms_of(make_prompt_cache(model)), cache[1:])
        with pytest.raises(UsageError, match="made with m, not with n"):
            open_prompt_cache(tmp_path / "c.safetensors", "n")


@pytest.mark.parametrize(
    "about",
    [
        {"tokenizer_config": '{"tokenizer_file": "/etc/passwd"}'},
        {"tokenizer_config": '{"trust_remote_code": 1}'},
        {"tokenizer_config": "[]"},
        {"tokenizer_config": NESTED},
        {"tokenizer_config": "{"},
    ],
)
def test_settings_of_a_prompt_cache_that_could_name_files_or_code_are_refused(
    tmp_path: Path, about: dict[str, str]
) -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 5, 8)), mx.zeros((1, 2, 5, 8)))
    save_prompt_cache(str(tmp_path / "c.safetensors"), [cache], {"model": "m"} | about)
    assert "c.safetensors" in refusal(UsageError, open_prompt_cache, tmp_path / "c.safetensors", "m")


@pytest.mark.parametrize("name", ["offset", "keys"])
@pytest.mark.parametrize("value", [-1, 2**40, 1.5, "x", None])
def test_a_prompt_cache_that_lies_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 5, 8)), mx.zeros((1, 2, 5, 8)))
    cache.state = tuple(
        value if n == name else v for n, v in zip(("keys", "values", "offset"), cache.state, strict=True)
    )
    path = tmp_path / "c.safetensors"
    save_prompt_cache(str(path), [cache], {})
    refusal(UsageError, open_prompt_cache, path, "m")


@pytest.mark.parametrize("odd", ODD)
def test_a_prompt_cache_without_end_is_refused_before_it_is_read(tmp_path: Path, odd: str) -> None:
    ODD[odd](tmp_path / "c.safetensors")
    assert "c.safetensors" in refusal(UsageError, open_prompt_cache, tmp_path / "c.safetensors", "m")


def test_other_safetensors_files_are_no_prompt_caches(llama: Path) -> None:
    assert "not a prompt cache" in refusal(UsageError, open_prompt_cache, llama / "model.safetensors", "m")
    assert "no such file" in refusal(UsageError, open_prompt_cache, llama / "nowhere.safetensors", "m")


def test_a_missing_config_is_still_named_as_missing(llama: Path) -> None:
    (llama / "config.json").unlink()
    assert "no config.json here" in refusal(MissingFileError, open_model, llama)
