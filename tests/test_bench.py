"""The plain way computes what mlx-lm does; benchmarks/claims.py measures, judges and cleans up."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from outcore.checkpoint.manifest import COMPACT
from outcore_bench import measure as measuring
from outcore_bench.jobs import BenchSettings, RunSettings, make_jobs
from outcore_bench.measure import measure
from outcore_packs.full_copy import pack_model
from zoo import save_checkpoint

BENCH = Path(__file__).parents[1] / "benchmarks"
cgroup = importlib.import_module("cgroup")
claims = importlib.import_module("claims")
judge = importlib.import_module("judge")
judge_pressure = importlib.import_module("judge_pressure")
make = importlib.import_module("make_checkpoint")
under_pressure = importlib.import_module("under_pressure")

PROMPT = [3, 1, 4, 1, 5]
BITS4 = {"group_size": 64, "bits": 4, "mode": "affine"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama-tiny"
    assert make.main(["llama-tiny", str(folder), "--shard-size", "500KB"]) == 0
    return folder


def logits(model: Any) -> list[bytes]:
    """Of a prompt, and of one token after it."""
    cache = make_prompt_cache(model)
    out = [model(mx.array([PROMPT]), cache=cache), model(mx.array([[9]]), cache=cache)]
    return [bytes(memoryview(o.astype(mx.float32))) for o in out]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", {"shard_bytes": 100_000}),
        ("llama", {"quantize": BITS4}),
        ("qwen3_5", {}),
        ("gpt2", {}),
        ("iquestloopcoder", {}),
    ],
)
def test_naive_streaming_gives_mlx_lms_logits(tmp_path: Path, model_type: str, options: dict[str, Any]) -> None:
    folder = save_checkpoint(model_type, tmp_path / "model", **options)
    expected = logits(mlx_lm.utils.load_model(folder)[0])
    with closing(measuring.NaiveStreaming(folder)) as plain:
        assert logits(plain.model) == expected


def test_naive_streaming_generates_mlx_lms_tokens(tiny: Path) -> None:
    model = mlx_lm.utils.load_model(tiny)[0]
    expected = [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=6)]
    with closing(measuring.NaiveStreaming(tiny)) as plain:
        assert [int(token) for token, _ in generate_step(mx.array(PROMPT), plain.model, max_tokens=6)] == expected


def test_naive_streaming_holds_no_layer_between_calls(tiny: Path) -> None:
    with closing(measuring.NaiveStreaming(tiny)) as plain:
        for _ in range(2):
            layers = plain.model.model.layers
            assert {layer.mlp.up_proj.weight.size for layer in layers} == {0}
            assert {layer.self_attn.q_proj.weight.size for layer in layers} == {0}
            mx.eval(plain.model(mx.array([PROMPT])))


def as_published(folder: Path) -> Path:
    """The model with convolutions as its authors publish them: mlx-lm turns them on loading, and shifts norms."""
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    turned = {name: mx.contiguous(a.moveaxis(1, 2)) if "conv1d" in name else a for name, a in weights.items()}
    mx.eval(turned)
    mx.save_safetensors(str(file), turned)
    return folder


@pytest.mark.parametrize("way", ["changed by mlx-lm", "compact"])
def test_naive_streaming_reads_whatever_outcore_streams(tmp_path: Path, way: str) -> None:
    folder = save_checkpoint("qwen3_5", tmp_path / "model", dtype=mx.bfloat16)
    kept = pack_model(folder, tmp_path / "packed", coding=COMPACT).folder if way == "compact" else as_published(folder)
    expected = logits(mlx_lm.utils.load_model(folder)[0])
    with closing(measuring.NaiveStreaming(kept)) as plain:
        assert logits(plain.model) == expected
        assert ({file.parent for file in plain.files} == {kept}) == (way == "compact")


def test_measurements_give_what_is_judged(tiny: Path) -> None:
    folder, disks = str(tiny), [1.0, 2.0]
    options: dict[str, Any] = {"tokens": 2, "prompt_tokens": 3}
    results = {
        "disk": [claims.disk(folder, threads=(1, 2), repeats=1, piece=300_000)],
        "resident_one": claims.resident(folder, cpu_streams=1, **options),
        "resident_all": claims.resident(folder, cpu_streams=None, **options),
        "streamed": claims.ours(folder, resident=0, **options) | {"disk_gbps": disks, "limit_bytes": None},
        "sweeps": claims.ours(folder, resident=0, tokens=1, prompt_tokens=40),
        "plain": claims.plain(folder, **options),
        "plain_limited": {"failed": "killed for memory"},
        "limited": {"failed": "killed for memory"},
        "small": {"skipped": "no control groups"},
    }
    json.dumps(results)
    judged = {claim.claim: claim for claim in judge.judge(results)}

    assert results["disk"][0]["gbps"].keys() == {"1", "2"}
    streamed = results["streamed"]
    assert streamed["streamed_units"] == 4
    # Counted from the reader, block rounding included; what is read ahead differs by up to three of four layers.
    planned = streamed["planned_bytes_per_token"]
    assert 0.6 * planned < streamed["bytes_per_token"] < 1.4 * planned + 4 * 100 * 4096
    assert len(streamed["seconds"]) == 2

    equal = judged["log-probabilities of greedy tokens: mlx-lm, ours, plain way"]
    assert (equal.measured, equal.holds) == ("4 tokens, 4 runs: equal", True)
    assert judged["sweeps, prompt of 40 tokens, 3 generated"].holds is True
    assert judged["limited: runs"].holds is False
    assert judged["plain_limited: runs"].holds is None
    assert judged["small: runs"].measured == "not measured: no control groups"
    assert sum("seconds per token" in claim for claim in judged) == 2


def test_a_difference_of_one_token_is_seen() -> None:
    results = {"disk": [], "a": {"digests": ["x", "y"]}, "b": {"digests": ["x", "z", "z"]}}
    (claim,) = judge.judge(results)
    assert (claim.measured, claim.holds) == ("2 tokens, 2 runs: different", False)


def test_speed_is_judged_by_the_greater_of_disk_and_compute() -> None:
    plan = {"resident_units": 1, "streamed_units": 3, "slots": 2, "bytes_per_token": 2e9, "limit_bytes": None}
    plan |= {"disk_gbps": [1.5, 2.5], "seconds": [1.0]}
    for per_token, compute, holds in ((1.1, 0.5, True), (1.2, 0.5, False), (1.2, 1.1, True)):
        (claim,) = judge._speed("x", plan | {"s_per_token": per_token}, compute)
        assert claim.holds is holds


def test_command_prints_one_json_document_last(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "claims.json"
    # The disk is read by a process of its own too.
    disk = claims.disk(str(tiny), threads=(1,), repeats=1, piece=300_000)
    monkeypatch.setattr(claims.Bench, "disk", lambda bench: bench.results["disk"].append(disk))
    assert claims.main([str(tiny), "--only", "sweeps", "--prompt-tokens", "20", "--json", str(out)]) == 0
    document = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert document["measurements"]["sweeps"]["sweeps_after_each_token"] == [1, 2, 3]
    assert {"cpu", "cores", "memory_bytes", "filesystem", "versions", "git_commit"} <= document["machine"].keys()


@pytest.mark.parametrize("command", [claims, under_pressure])
def test_wrong_arguments_are_refused(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, message in ((["--only", "nothing"], "--only nothing: choose from"), (["--tokens", "0"], "at least")):
        with pytest.raises(SystemExit, match="2"):
            command.main([str(tmp_path), *args])
        assert message in capsys.readouterr().err


def test_runs_under_pressure_are_judged_as_published() -> None:
    document = json.loads((BENCH / "results" / "under-pressure-llama-4gb-cpu.json").read_text())
    assert [dataclasses.asdict(claim) for claim in judge_pressure.judge(document["runs"])] == document["claims"]


@pytest.mark.parametrize("failed", ["neighbour", "cliff"])
def test_a_run_that_pressure_ends_breaks_its_promise(failed: str) -> None:
    document = json.loads((BENCH / "results" / "under-pressure-llama-4gb-cpu.json").read_text())
    document["runs"][failed] = {"failed": "killed for memory", "limit_bytes": 1}
    (claim,) = (c for c in judge_pressure.judge(document["runs"]) if c.claim == f"{failed}: survives")
    assert (claim.measured, claim.holds) == ("killed for memory", False)


def test_missing_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert claims.main([str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith(f"claims: {tmp_path / 'none'}: no such folder")


def test_group_kills_what_passes_its_limit_and_is_removed(tmp_path: Path) -> None:
    allocate = [sys.executable, "-c", "import sys; print(len(bytearray(int(sys.argv[1]))))"]
    try:
        with cgroup.Cgroup("outcore-test", 64_000_000) as group:
            fits = subprocess.run(group.wrap([*allocate, "20000000"]), capture_output=True, text=True)
            kills = group.kills
            passes = subprocess.run(group.wrap([*allocate, "200000000"]), capture_output=True, text=True)
            peak, killed = group.peak_bytes, group.kills
    except cgroup.CgroupError as e:
        pytest.skip(str(e))
    assert (fits.stdout, kills) == ("20000000\n", 0)
    assert passes.returncode != 0
    assert killed == 1
    assert peak is None or 20_000_000 < peak <= 64_000_000
    assert not group.path.exists()


def test_packed_copies_are_measured_too(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path / "model")
    run = RunSettings(max_tokens=2, prompt_tokens=8, repeats=1)
    asked = BenchSettings(modes=("outcore",), resident=("0",), run=run)
    original, packed = (
        measure(make_jobs(asked, str(f), 4, fits=False)[0])
        for f in (folder, pack_model(folder, tmp_path / "whole").folder)
    )
    assert packed.tokens == original.tokens
