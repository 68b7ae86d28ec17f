"""Weights stored in fewer bytes: every bit comes back, and a model that is read from such a copy computes the same."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.generate import generate_step

import outcore
import zoo
from outcore.checkpoint.checkpoint import read_header
from outcore.checkpoint.manifest import MANIFEST
from outcore.checkpoint.packed_store import open_packed
from outcore.decode import preparation
from outcore.decode.preparation import prepare
from outcore.errors import StoreError
from outcore_calibrate import layer_times
from outcore_packs.codings import SPLITTING_SOURCE, SplitDecoder, side_table_of
from outcore_packs.full_copy import pack_model
from stand_ins import TokensOnly

IDS = [3 + (7919 * i) % 50 for i in range(20)]
RUN: dict[str, Any] = {"context": 320, "prefill_step_size": 16}


def bits(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16))


def normal(rows: int, columns: int, seed: int = 0) -> mx.array:
    return (mx.random.normal((rows, columns), key=mx.random.key(seed)) * columns**-0.5).astype(mx.bfloat16)


@pytest.fixture(scope="module")
def every_pattern() -> np.ndarray:
    """All 65,536 patterns among weights that are usual; some rows of escapes alone, and escapes side by side."""
    words = bits(normal(1024, 2048)).copy()
    rng = np.random.default_rng(0)
    flat = words.reshape(-1)
    flat[rng.choice(flat.size - 4096, 1 << 16, replace=False)] = np.arange(1 << 16)
    words[-2] = 0x7F80 | np.arange(2048) % 128  # infinities and what is no number
    words[-1, ::2047] = 0x8000
    return words


# Exponents


def stored_rows(decoder: SplitDecoder, words: np.ndarray) -> np.ndarray:
    found = np.frombuffer(b"".join(decoder.encoded(words)), np.uint8)
    return found.reshape(decoder.stored_shape)


def test_every_pattern_comes_back(every_pattern: np.ndarray) -> None:
    assert len(np.unique(every_pattern)) == 1 << 16
    side_table = side_table_of(every_pattern)
    assert side_table is not None
    decoder = SplitDecoder.of(every_pattern.shape, side_table)
    stored = stored_rows(decoder, every_pattern)
    assert stored.nbytes == every_pattern.nbytes * 3 // 4
    assert np.array_equal(np.array(decoder.stored), side_table)
    assert decoder.nbytes <= 2 * side_table.nbytes
    assert np.array_equal(bits(decoder.decode(mx.array(stored))), every_pattern)


def test_the_kernel_for_gpus_decodes_as_the_processor_does(every_pattern: np.ndarray, tmp_path: Path) -> None:
    """Its source is C: compiled here with a loop around it, in the place of a device's threads."""
    side_table = side_table_of(every_pattern)
    assert side_table is not None
    rows, columns = every_pattern.shape
    stored = stored_rows(SplitDecoder.of(every_pattern.shape, side_table), every_pattern)
    count = rows * columns // 4
    source = f"""#include <cstdio>
    static void thread(unsigned at, const unsigned *words, const unsigned short *halves, const unsigned char *exponents,
                       const unsigned *side_table, const unsigned *sizes, unsigned *out) {{ {SPLITTING_SOURCE} }}
    static unsigned rows[{stored.size // 4}], side_table[{side_table.size}], pairs[{count * 2}];
    int main() {{
      const unsigned sizes[] = {{{count}, {columns // 4}}};
      if (fread(rows, 4, {stored.size // 4}, stdin) != {stored.size // 4}) return 1;
      if (fread(side_table, 4, {side_table.size}, stdin) != {side_table.size}) return 1;
      for (unsigned at = 0; at < {count} + 9; at++)
        thread(at, rows, (const unsigned short *)rows, (const unsigned char *)side_table, side_table + 4, sizes, pairs);
      fwrite(pairs, 4, {count * 2}, stdout);
    }}"""
    (tmp_path / "split.cpp").write_text(source)
    built = ["g++", "-O1", "-fno-strict-aliasing", "-o", tmp_path / "split", tmp_path / "split.cpp"]
    subprocess.run(built, check=True)
    given = stored.tobytes() + side_table.tobytes()
    made = subprocess.run([tmp_path / "split"], input=given, capture_output=True, check=True).stdout
    assert made == every_pattern.tobytes()


def test_exponents_that_are_many_are_left_as_they_are() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 16, (256, 256)).astype(np.uint16)
    assert side_table_of(words) is None
    assert side_table_of(bits(normal(256, 256))) is not None


def test_what_reads_beyond_a_matrix_is_refused() -> None:
    words = bits(normal(256, 256)).copy()
    words[::9, 5] = 0
    side_table = side_table_of(words)
    assert side_table is not None and SplitDecoder.of(words.shape, side_table)
    wrong = [
        side_table[:-1],
        np.append(side_table, 0),
        side_table[:4],
        np.r_[side_table[:8], side_table[8:9] + 99, side_table[9:]],
    ]
    wrong += [np.r_[side_table[:-1], np.uint32(256 << 8)]]
    for each in wrong:
        with pytest.raises(ValueError, match="not of this matrix"):
            SplitDecoder.of(words.shape, each.astype(np.uint32))


# Copies


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OUTCORE_CACHE", str(folder))
    return folder


def checkpoint(folder: Path, model_type: str, **settings: Any) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        config = copy.deepcopy(zoo.CONFIGS[model_type])
        config.get("text_config", config).update(settings)
        patch.setitem(zoo.CONFIGS, model_type, config)
        return zoo.save_checkpoint(model_type, folder, dtype=mx.bfloat16)


WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and copies of it."""
    folder = tmp_path_factory.mktemp("codings")
    checkpoint(folder / "model", "qwen3", **WIDE)
    for coding in ("plain", "compact"):
        pack_model(folder / "model", folder / coding, coding=coding)
    return folder


def wanted(folder: Path, dtype: mx.Dtype | None = None, count: int = 4) -> list[tuple[int, mx.array]]:
    model = mlx_lm.utils.load_model(folder)[0]
    if dtype is not None:
        model.set_dtype(dtype)
    steps = generate_step(mx.array(IDS), model, max_tokens=count, prefill_step_size=16)
    return [(int(token), logprobs) for token, logprobs in steps]


@pytest.fixture(scope="module")
def answer(made: Path) -> Iterator[list[tuple[int, mx.array]]]:
    yield wanted(made / "model")


def same(model: Any, expected: list[tuple[int, mx.array]]) -> bool:
    found = list(outcore.stream_generate(model, TokensOnly(), IDS, max_tokens=len(expected), prefill_step_size=16))
    tokens = [r.token for r in found] == [token for token, _ in expected]
    return tokens and all(mx.array_equal(r.logprobs, w).item() for r, (_, w) in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_5", "deepseek_v3", "nanbeige"],  # the last calls its layers twice
)
def test_answers_are_the_same_bits(model_type: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", model_type)
    store = pack_model(folder, tmp_path / "copy", coding="compact")
    assert {c.coding for c in store.manifest.codings.values()} == {"split16"}
    # MLX's CPU backend gathers no bfloat16.
    cases = [(2, mx.float32)] if model_type == "deepseek_v3" else [(0, None), (2, mx.float32)]
    for resident, dtype in cases:
        name = None if dtype is None else "float32"
        model, _ = outcore.load_model(
            tmp_path / "copy", memory="1GB", resident=resident, dtype=name, draft="none", govern=False, **RUN
        )
        with model.outcore as session:
            assert any(any(u.decoders) for u in session.streaming.layers.units) and session.plan.streamed
            assert same(model, wanted(folder, dtype))


def test_bytes_of_a_pass(made: Path) -> None:
    def read(folder: Path) -> int:
        parts = prepare(folder, memory="1GB").profile.parts
        return sum(f.nbytes for p in parts if p.unit is not None for f in p.unit.fields)

    assert read(made / "compact") == pytest.approx(read(made / "plain") * 0.75, rel=0.001)


def test_peak_memory_stays_within_the_smallest_budget(made: Path, answer: list[tuple[int, mx.array]]) -> None:
    smallest = prepare(made / "compact", memory="1GB", **RUN).planning.smallest
    model, _ = outcore.load_model(made / "compact", memory=smallest, draft="none", govern=False, **RUN)
    with model.outcore as session:
        mx.reset_peak_memory()
        assert same(model, answer)
        assert mx.get_peak_memory() <= session.plan.peak_bytes <= smallest
        assert session.plan.split  # layers are read in parts


def test_a_prompt_is_decoded_for_once(
    made: Path, answer: list[tuple[int, mx.array]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = outcore.load_model(made / "compact", memory="1GB", resident=0, draft="none", govern=False, **RUN)
    decode, calls = SplitDecoder.decode, 0

    def counting(self: SplitDecoder, rows: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return decode(self, rows)

    monkeypatch.setattr(SplitDecoder, "decode", counting)
    with model.outcore as session:
        assert same(model, answer[:1])
        # Three passes, of 16 tokens, the rest and the last, in one sweep.
        assert session.metrics.sweeps == 1 and calls == 3 * 7


def test_what_stays_is_decoded_once(made: Path, answer: list[tuple[int, mx.array]]) -> None:
    model, _ = outcore.load_model(made / "compact", memory="1GB", draft="none", **RUN)
    with model.outcore as session:
        assert not session.plan.streamed and same(model, answer)
        plain = dict(mlx_lm.utils.load_model(made / "model")[0].named_modules())
        path = "model.layers.1.mlp.up_proj"
        assert mx.array_equal(dict(model.named_modules())[path].weight, plain[path].weight).item()


def test_layers_come_and_go_and_failures_change_nothing(made: Path, answer: list[tuple[int, mx.array]]) -> None:
    class Stop(Exception): ...

    model, _ = outcore.load_model(made / "compact", memory="1GB", resident=2, draft="none", **RUN)
    with model.outcore as session:
        assert session.residency.layers.shed(2) == 2 and same(model, answer)
        calls = iter(range(10**6))

        def stop() -> None:
            if next(calls) == 2:
                raise Stop

        session.streaming.after_unit.append(stop)
        with pytest.raises(Stop):
            same(model, answer)
        assert same(model, answer)
        assert session.residency.layers.regrow(2) == 2 and same(model, answer)
        assert len(session.plan.resident) == 2


def test_a_coding_costs_memory_that_is_counted(made: Path) -> None:
    plain, compact = (prepare(made / name, memory="1GB", resident=0).profile for name in ("plain", "compact"))
    side_tables = sum(d.nbytes for d in compact.lazy.decoders.values())
    assert compact.size.non_layer == plain.size.non_layer + side_tables
    one, other = compact.size.layers[0], plain.size.layers[0]
    assert one.decoded == other.resident and other.decoded == other.cast == 0
    assert one.cast == 2 * one.decoded  # those of two layers may be there at once
    assert one.kind == other.kind and one.resident == other.resident and one.read < other.read


# Stores


def test_plain_copies_are_as_before(made: Path) -> None:
    manifests = {name: json.loads((made / name / MANIFEST).read_text()) for name in ("plain", "compact")}
    assert manifests["plain"]["schema"] == 1 and "codings" not in manifests["plain"]
    assert manifests["compact"]["schema"] == 2 and len(manifests["compact"]["codings"]) == 3 * 7
    assert open_packed(made / "plain").decoders == {}


def test_without_the_package_a_copy_is_refused_by_its_codings_name(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.checkpoint.packed_store.modules", lambda _: {})
    with pytest.raises(StoreError, match="packed with --coding compact, which needs the package outcore_packs"):
        open_packed(made / "compact")
    assert not prepare(made / "plain", memory="1GB").profile.lazy.decoders


def test_another_coding_is_another_copy(made: Path, tmp_path: Path) -> None:
    pack_model(made / "model", tmp_path / "copy")
    with pytest.raises(StoreError, match="packed with --coding plain"):
        pack_model(made / "model", tmp_path / "copy", coding="compact")
    assert pack_model(made / "model", tmp_path / "copy", coding="compact", force=True).manifest.coding == "compact"
    assert pack_model(made / "model", tmp_path / "copy", coding="compact").manifest.codings


def test_a_pack_that_was_cut_off_goes_on(made: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if "layers.1" in what and what.startswith("packing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_model(made / "model", tmp_path / "copy", coding="compact", progress=stop)
    first = tmp_path / "copy" / "layer_0000.safetensors"
    before = first.stat().st_ino
    pack_model(made / "model", tmp_path / "copy", coding="compact")
    assert first.stat().st_ino == before
    for name in ("layer_0002", "non_layer"):
        file = f"{name}.safetensors"
        assert (tmp_path / "copy" / file).read_bytes() == (made / "compact" / file).read_bytes()


def test_a_device_that_decodes_other_bits_gets_no_copy(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = SplitDecoder.decode
    monkeypatch.setattr(SplitDecoder, "decode", lambda self, rows: decode(self, rows) + 0.5)
    with pytest.raises(StoreError, match="decodes to other bits on this device"):
        pack_model(made / "model", tmp_path / "copy", coding="compact")


@pytest.mark.parametrize("wrong", ["missing", "twice", "beside", "kind", "dropped", "schema"])
def test_manifests_that_lie_are_refused(made: Path, tmp_path: Path, wrong: str) -> None:
    subprocess.run(["cp", "-a", made / "compact", tmp_path / "copy"], check=True)
    path = tmp_path / "copy" / MANIFEST
    manifest = json.loads(path.read_text())
    codings, name = manifest["codings"], "model.layers.0.mlp.up_proj.weight"
    if wrong == "missing":
        codings["model.layers.9.mlp.up_proj.weight"] = codings[name]
    elif wrong == "twice":
        codings[f"{name}.split16"] = codings.pop(name)
    elif wrong == "beside":
        info = open_packed(tmp_path / "copy").folder / "non_layer.safetensors"
        found = read_header(info)[f"{name}.split16.beside"]
        with info.open("r+b") as file:
            file.seek(found.offset + 20)
            file.write(b"\xff\xff\xff\xff")
        manifest["files"][info.name] |= {"mtime_ns": info.stat().st_mtime_ns}
    elif wrong == "kind":
        codings[name] = codings[name] | {"coding": "planes"}
    elif wrong == "dropped":
        codings["model.layers.0.mlp.up_proj.scales"] = {"coding": "steps4", "xxh3_128": "0" * 32}
    else:
        manifest["schema"] = 4
    path.write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="pack again"):
        open_packed(tmp_path / "copy")


# The choice


def test_a_compact_copy_in_the_cache_is_read_on_a_gpu(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "rows_differ", lambda _: False)  # what rounding shows is tested by itself
    before = prepare(made / "model", memory="1GB", resident=0, **RUN)
    pack_model(made / "model", None, coding="compact")
    shutil.copytree(made / "model", tmp_path / "mirror")
    for cpu, more, taken in ((True, {}, False), (False, {"mirror": tmp_path / "mirror"}, False), (False, {}, True)):
        monkeypatch.setattr(preparation, "on_cpu", lambda found=cpu: found)
        found = prepare(made / "model", memory="1GB", resident=0, **RUN, **more)
        assert bool(found.profile.lazy.decoders) == taken
    assert found.plan.bytes_per_token < 0.8 * before.plan.bytes_per_token


def test_decoding_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "PAST_CACHES", 4 << 20)
    assert 0.001 < layer_times.decode_gbps() < 1e5
