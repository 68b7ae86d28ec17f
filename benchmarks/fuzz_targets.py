"""What is fed with broken files and words, by the ways that a user's come in; see ``fuzz``."""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

import _support  # noqa: F401
import mutations
import zoo
from outcore import OutcoreError, load_model
from outcore.calibration.calibration_file import store_calibration
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.cli.engine import ProgressBar
from outcore.cli.generate import prompt_cache
from outcore.decode.budget import asked_budget
from outcore.decode.preparation import prepare
from outcore.modules.cache_check import check_cache
from outcore.plan.planner import ASSUMED
from outcore_batch.command import read_requests
from outcore_batch.files import Output, line_error, read_lines
from outcore_bench.document import read_inputs
from outcore_packs.full_copy import pack_model


@dataclass(frozen=True)
class FuzzTarget:
    """Something that takes what went wrong.

    Attributes:
        examples: what it is given.
        run: gives it one; Outcore's own errors are part of it, any other is a defect.
    """

    examples: st.SearchStrategy[Any]
    run: Callable[[Any], object]


def targets(folder: Path) -> dict[str, Callable[[], FuzzTarget]]:
    """Makers of all targets by name, with files of their own in ``folder``.

    The environment is changed: packed copies and calibrations go there too, and the Hub is not asked.
    """
    os.environ |= {"OUTCORE_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    made = {
        "header": lambda: _file(folder, _model(folder), "model.safetensors", mutations.safetensors),
        "index": lambda: _file(folder, _model(folder, shards=True), "model.safetensors.index.json", _json),
        "config": lambda: _file(folder, _model(folder), "config.json", _json),
        "manifest": lambda: _file(folder, _packed(folder), "manifest.json", _json),
        "packed": lambda: _file(folder, _packed(folder), "layer_0001.safetensors", mutations.safetensors),
        "adapter": lambda: _adapter(folder),
        "tokenizer": lambda: _tokenizer(folder),
        "calibration": lambda: _calibration(folder),
        "batch": lambda: _batch(folder),
        "answers": lambda: _answers(folder),
        "prompt-cache": lambda: _prompt_cache(folder),
        "report": lambda: _report(folder),
        "memory": _memory,
        "draft": lambda: _draft(folder),
    }
    return made


def _model(folder: Path, *, shards: bool = False) -> Path:
    return zoo.save_checkpoint("llama", folder / "model", shard_bytes=100_000 if shards else None)


def _packed(folder: Path) -> Path:
    with_packed = folder / "packed"
    pack_model(_model(folder), with_packed)
    return with_packed


def _json(base: bytes) -> st.SearchStrategy[bytes]:
    return mutations.texts(json.loads(base))


def _file(folder: Path, model: Path, name: str, mutated: Callable[[bytes], st.SearchStrategy[bytes]]) -> FuzzTarget:
    """A file of a model's folder, on the way to a plan."""
    file = model / name
    return FuzzTarget(mutated(file.read_bytes()), partial(_planned_with, model, file))


def _planned_with(model: Path, file: Path, data: bytes) -> None:
    # Never written to in place: an earlier example may have mapped it.
    beside = file.with_suffix(".new")
    beside.write_bytes(data)
    beside.replace(file)
    prepare(model, memory="1GB", context=32)


def _adapter(folder: Path) -> FuzzTarget:
    model, adapter = _model(folder), folder / "adapter"
    adapter.mkdir()
    config = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}
    lora = {f"model.layers.{i}.self_attn.q_proj.lora_a": mx.zeros((64, 4)) for i in range(4)}
    lora |= {f"model.layers.{i}.self_attn.q_proj.lora_b": mx.zeros((4, 128)) for i in range(4)}
    mx.save_safetensors(str(adapter / "adapters.safetensors"), lora)
    weights = (adapter / "adapters.safetensors").read_bytes()
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    def run(example: tuple[bytes | None, bytes | None]) -> None:
        text, data = example
        (adapter / "adapter_config.json").write_bytes(json.dumps(config).encode() if text is None else text)
        (adapter / "adapters.safetensors").unlink()
        (adapter / "adapters.safetensors").write_bytes(weights if data is None else data)
        prepare(model, memory="1GB", context=32, adapter_path=str(adapter))

    files = mutations.safetensors(weights)
    return FuzzTarget(st.tuples(mutations.texts(config), st.none()) | st.tuples(st.none(), files), run)


def _tokenizer(folder: Path) -> FuzzTarget:
    source = Path(str(resources.files("outcore_demo_model")))
    model = _model(folder)
    whole = {name: (source / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}

    def run(example: tuple[str, bytes]) -> None:
        for name, data in (whole | dict([example])).items():
            (model / name).write_bytes(data)
        load_tokenizer(model)

    examples = (st.tuples(st.just(name), _json(data)) for name, data in whole.items())
    return FuzzTarget(st.one_of(*examples), run)


def _calibration(folder: Path) -> FuzzTarget:
    model = _model(folder)
    streams = prepare(model, memory="1GB", context=32).cpu_streams
    file = store_calibration(model, streams, replace(ASSUMED, kinds={"x": {1: 1e-3, 8: 2e-3}}))
    return FuzzTarget(_json(file.read_bytes()), partial(_planned_with, model, file))


def _batch(folder: Path) -> FuzzTarget:
    model = Path(str(resources.files("outcore_demo_model")))
    tokenizer, source = load_tokenizer(model), folder / "requests.jsonl"
    chat = {
        "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "a", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": ""}]}],
            "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "max_tokens": 5, "stop": ["a", "b"],
            "repetition_penalty": 1.1, "repetition_context_size": 20, "presence_penalty": 0.5, "logit_bias": {"5": 1},
            "chat_template_kwargs": {"x": 1}, "model": "m",
        },
    }  # fmt: skip
    text = {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "x", "max_completion_tokens": 5, "n": 1}}
    ids = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": [5, 6], "frequency_penalty": 1.0}}
    logits = mx.zeros((1, 8192))

    def run(example: bytes) -> None:
        source.write_bytes(example + b"\n" + json.dumps(text | {"custom_id": "last"}).encode())
        lines = list(read_lines(source))
        requests, errors = read_requests(lines, tokenizer, 5, 4096, ProgressBar())
        # Whatever the first line is, the last one is answered, and none of the errors is one that nobody foresaw.
        assert "last" in [lines[r.uid].custom_id for r in requests]
        for _, error in errors:
            if line_error(error).code == "internal_error":
                raise error
        for request in requests:
            changed = logits
            for process in request.processors:
                changed = process(mx.array(list(request.tokens)), changed)
            if request.sampler is not None:
                mx.eval(request.sampler(changed - mx.logsumexp(changed, axis=-1, keepdims=True)))

    return FuzzTarget(st.one_of(*map(mutations.texts, (chat, text, ids))), run)


def _answers(folder: Path) -> FuzzTarget:
    source, output = folder / "requests.jsonl", folder / "answers.jsonl"
    source.write_text("")
    good = {"id": "a", "custom_id": "x", "response": {"body": {"model": "m"}}, "error": None}
    bad = {"id": "b", "custom_id": "y", "response": None, "error": {"code": "insufficient_memory", "message": "z"}}

    def run(example: bytes) -> None:
        output.write_bytes(json.dumps(bad).encode() + b"\n" + example + b"\n" + json.dumps(good).encode() + b"\n")
        with Output(output, source, "m", resume=True) as opened:
            opened.require({"a", "b"})
            opened.begin()

    return FuzzTarget(mutations.texts(good) | mutations.texts(bad), run)


def _prompt_cache(folder: Path) -> FuzzTarget:
    model, _ = load_model(_model(folder), memory="1GB", context=32, draft="none")
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[5, 6, 7]]), cache=cache))
    file = folder / "cache.safetensors"
    save_prompt_cache(str(file), cache, {"model": "m", "tokenizer_config": "{}"})

    def run(data: bytes) -> None:
        file.unlink()
        file.write_bytes(data)
        found, _ = prompt_cache(Namespace(prompt_cache_file=str(file), model="m"))
        assert found is not None
        check_cache(model.outcore.forms, found)
        mx.eval(model(mx.array([[8]]), cache=found))

    return FuzzTarget(mutations.safetensors(file.read_bytes()), run)


def _report(folder: Path) -> FuzzTarget:
    results = Path(__file__).parent / "results" / "llama-4gb-cpu.json"
    file = folder / "result.json"

    def run(data: bytes) -> None:
        file.write_bytes(data)
        read_inputs([file])

    return FuzzTarget(_json(results.read_bytes()), run)


def _memory() -> FuzzTarget:
    units = st.sampled_from(["", "B", "GB", "GiB", "%", " mb", "k", "TB", "auto", "e9", "."])
    sizes = st.builds(lambda n, unit: f"{n}{unit}", st.integers() | st.floats() | st.text(max_size=5), units)
    return FuzzTarget(sizes | st.text() | mutations.values, lambda size: asked_budget(size))


def _draft(folder: Path) -> FuzzTarget:
    model = _model(folder)
    words = st.sampled_from(["auto", "none", "ngram", "self", "self:", "self:3", "ngrm", "llama3:3b", "https://x/y/z"])
    drafts = words | st.builds(lambda w, t: w + t, words, st.text(max_size=4)) | st.sampled_from(mutations.TEXTS)

    def run(draft: str) -> None:
        prepare(model, memory="1GB", context=32, draft=draft)

    return FuzzTarget(drafts, run)


def refused(run: Callable[[Any], object], example: Any) -> bool:
    """Whether an example was refused; what is raised otherwise is a defect."""
    try:
        run(example)
    except OutcoreError as e:
        text = str(e)
        assert text and "\n" not in text, f"not one line: {text!r}"
        return True
    return False


def fresh(folder: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
