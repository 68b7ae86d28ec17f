"""A table of 4 GB beside a small model, within 300 MB: rows read once a token and before it, text equal to resident.

    python benchmarks/row_tables.py DIR [--json FILE] [--gigabytes 4] [--memory 300MB] [--tokens 32] [--keep]

Writes a checkpoint of random weights into DIR for each kind of table (real bytes, no holes), drops its pages from the
page cache before each run, and removes it afterwards:

    outside  mlx-lm's longcat_flash_ngram: 12 tables of hashed n-grams before the layers
    inside   mlx-vlm's qwen4_exp: tables of hashed n-grams in parts, inside two of the layers

Each is run resident by its own library, and by Outcore with and without knowing rows before a pass; each run is a
process. ``wait`` is what the computing thread waits for rows, ``foresight`` what finding them takes, as shares of a
token's time; ``late`` are those of the ``lookups`` of which no read had begun. ``--rate`` (bytes a second) and
``--reads`` (reads a second) make the disk slow (``slow_disk.py``, needs root); ``--rounds`` repeats the streamed runs
in turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import _support  # noqa: F401
import zoo
from result_file import write_result
from slow_disk import slow_disk

PROMPT = [3 + (7919 * i) % 16000 for i in range(48)]
DTYPES = {mx.float32: "F32", mx.int64: "I64", mx.int32: "I32"}
PART = 1 << 26


def config_of(kind: str, nbytes: int) -> dict[str, Any]:
    own: dict[str, Any]
    if kind == "outside":
        own = {"vocab_size": 16384, "hidden_size": 768, "num_layers": 4, "ffn_hidden_size": 1536, "emb_neighbor_num": 4}
        own |= {"expert_ffn_hidden_size": 384, "emb_split_num": 4}
        ratio = nbytes // (16384 * 768 * 4)
        return {**zoo.CONFIGS["longcat_flash_ngram"], **own, "ngram_vocab_size_ratio": ratio}
    import vision_configs

    config = vision_configs.config_of("qwen4_exp")
    rows = nbytes // (2 * 4 * 256 * 4)  # two layers with four tables of hashes of 256 numbers
    own = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256}
    own |= {"shared_expert_intermediate_size": 256, "ple_layer_ids": [1, 3], "ple_embed_dim": 1024}
    own |= {"ngram_vocab_size_base": rows, "split_ngram_parts": 8}
    config["text_config"] |= own
    return {**config, "vocab_size": 16384, "hidden_size": 512}


def build(kind: str, config: dict[str, Any]) -> Any:
    if kind == "outside":
        from mlx_lm.utils import _get_classes

        model, arguments = _get_classes(config)
    else:
        from outcore_vision.text_model import text_classes

        model, arguments = text_classes("qwen4_exp")
    return model(arguments.from_dict(copy.deepcopy(config)))


def write(kind: str, folder: Path, nbytes: int) -> int:
    """Writes a checkpoint of random weights, one part of a tensor at a time. Returns its tables' bytes."""
    config = config_of(kind, nbytes)
    model = build(kind, config)
    parameters = [(k, a) for k, a in tree_flatten(model.parameters()) if not k.startswith("vision")]
    header, at = dict[str, Any](), 0
    for path, a in parameters:
        header[path] = {"dtype": DTYPES[a.dtype], "shape": a.shape, "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    # Numbers between 0.03 and 0.06 of either sign; each part differs from all others in its low bits, which is quick.
    drawn = np.random.default_rng(0).integers(0, 1 << 32, PART // 4, dtype=np.uint32)
    drawn_once = (drawn & 0x807FFFFF) | 0x3D000000
    tables = parts = 0
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(said)) + said)
        for n, (path, a) in enumerate(parameters):
            if a.nbytes < PART:
                small = a if a.dtype != mx.float32 else zoo._draw(path, a, mx.random.key(n))
                file.write(np.array(small).tobytes())
                continue
            tables += a.nbytes * ("embed_tokens" not in path and "word_embeddings" not in path)
            for begin in range(0, a.size, PART // 4):
                parts += 1
                file.write((drawn_once[: a.size - begin] ^ parts).data)
        file.flush()
        os.fsync(file.fileno())
    return tables


def cold(folder: Path) -> None:
    with (folder / "model.safetensors").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def decode(model: Any, cache: Any, tokens: int) -> tuple[list[int], list[np.ndarray[Any, Any]], list[float]]:
    ids, found, logits, seconds = PROMPT, list[int](), [], []
    for _ in range(tokens):
        began = time.perf_counter()
        out = model(mx.array([ids]), cache=cache)
        out = getattr(out, "logits", out)[0, -1]
        mx.eval(out)
        seconds.append(time.perf_counter() - began)
        logits.append(np.array(out))
        found.append(int(np.argmax(logits[-1])))
        ids = found[-1:]
    return found, logits, seconds


def resident(kind: str, folder: Path, tokens: int) -> dict[str, Any]:
    if kind == "outside":
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        model = load_model(folder)[0]
    else:
        import mlx_vlm.utils
        from mlx_vlm.models.cache import make_prompt_cache

        model = mlx_vlm.utils.load_model(folder).language_model
    found, logits, seconds = decode(model, make_prompt_cache(model), tokens)
    np.save(folder / "logits.npy", np.stack(logits))
    return {"tokens": found, "token_s": float(np.median(seconds[1:])), "peak_rss_bytes": memory("VmHWM")}


def streamed(kind: str, folder: Path, tokens: int, budget: str, foresee: bool) -> dict[str, Any]:
    from mlx_lm.models.cache import make_prompt_cache

    from outcore import load_model
    from outcore.disk.reader import RowReader
    from outcore.modules.mlx_lm_compat import MODEL_TYPES
    from outcore_rows import row_prefetch

    spent, late, lookups = {"wait": 0.0, "foresight": 0.0}, 0, 0
    read, begin, install = RowReader.read, row_prefetch.RowPrefetch.begin, row_prefetch.install

    def timed(self: RowReader, path: Path, offset: int, nbytes: int, rows: Any, name: str) -> Any:
        nonlocal late, lookups
        lookups += 1
        late += (path, offset, *rows) not in ahead
        began = time.perf_counter()
        try:
            return read(self, path, offset, nbytes, rows, name)
        finally:
            spent["wait"] += time.perf_counter() - began

    ahead = set[Any]()

    def begun(self: Any, *args: Any) -> None:
        began = time.perf_counter()
        begin(self, *args)
        spent["foresight"] += time.perf_counter() - began
        ahead.clear()
        ahead.update(key for t in self._tables for key in t.reader.ahead)

    RowReader.read, row_prefetch.RowPrefetch.begin = timed, begun  # type: ignore[method-assign, assignment]
    row_prefetch.install = install if foresee else lambda *_: None
    before = memory("VmRSS")
    wanted = {MODEL_TYPES: "vision"} if kind == "inside" else {}
    model, _ = load_model(folder, memory=budget, draft="none", context=256, prompt=64, model_config=wanted)
    with model.outcore as session:
        cache = make_prompt_cache(model)
        first = decode(model, cache, 1)
        prompt_s, rows = first[2][0], session.metrics.rows_read
        spent.update(wait=0.0, foresight=0.0)
        late_prompt, late, lookups, used, began = late, 0, 0, time.process_time(), time.perf_counter()
        found, logits, ids = [*first[0]], [*first[1]], first[0]
        for _ in range(tokens - 1):
            out = model(mx.array([ids]), cache=cache)[0, -1]
            mx.eval(out)
            logits.append(np.array(out))
            ids = [int(np.argmax(logits[-1]))]
            found += ids
        seconds, used = time.perf_counter() - began, time.process_time() - used
        size, plan, each = session.size, session.plan, tokens - 1
        same = np.array_equal(np.stack(logits), np.load(folder / "logits.npy"))
        return {
            "equal": same, "tokens": found, "prompt_s": prompt_s, "token_s": seconds / each,
            "token_cpu_s": used / each, "lookups": lookups,
            "wait": spent["wait"] / seconds, "foresight": spent["foresight"] / seconds,
            "rows_per_token": (session.metrics.rows_read - rows) / each, "late": late, "late_in_prompt": late_prompt,
            "row_bytes_per_token": size.row_bytes, "by_row_bytes": size.tables, "budget_bytes": plan.budget_bytes,
            "smallest_budget_bytes": plan.smallest_budget_bytes, "streamed": len(plan.streamed),
            "resident": len(plan.resident), "bytes_per_token": plan.bytes_per_token,
            "peak_memory_bytes": mx.get_peak_memory(), "rss_before_bytes": before, "peak_rss_bytes": memory("VmHWM"),
        }  # fmt: skip


def _join(group: Path | None) -> None:
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


RUNS = ["resident", "foreseen", "on demand"]


def child(kind: str, folder: Path, run: str, args: argparse.Namespace) -> dict[str, Any]:
    cold(folder)
    command = [sys.executable, __file__, str(folder), "--run", run, "--kind", kind, "--memory", args.memory]
    command += ["--tokens", str(args.tokens)]
    with slow_disk(folder, args.rate, args.reads) as group:
        join = partial(_join, None if run == "resident" else group)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=join)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--memory", default="300MB")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rate", type=int)
    parser.add_argument("--reads", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--kind", choices=["outside", "inside"], action="append")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        one = args.kind[0], args.folder, args.tokens
        print(json.dumps(resident(*one) if args.run == "resident" else
                         streamed(*one, args.memory, args.run == "foreseen")))  # fmt: skip
        return
    rows = []
    for kind in args.kind or ["outside", "inside"]:
        folder = args.folder / f"row-tables-{kind}"
        tables = 0 if folder.exists() else write(kind, folder, int(args.gigabytes * 1e9))
        for run in RUNS[:1] + RUNS[1:] * args.rounds:
            row = {"kind": kind, "run": run, "table_bytes": tables, **child(kind, folder, run, args)}
            rows.append(row)
            print({k: v for k, v in row.items() if k != "tokens"}, flush=True)
        if not args.keep:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    write_result(args.json, "row_tables", args.folder, rows=rows)


if __name__ == "__main__":
    main()
