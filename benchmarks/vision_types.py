"""mlx-vlm's types, streamed: the logits of a tiny random model of each equal mlx-vlm's own, bit for bit.

    python benchmarks/vision_types.py [FOLDER ...] [--dtype float32] [--json FILE] [--keep DIR]

For each model folder of mlx-vlm: whether a tiny checkpoint can be made here, and whether its logits (a prompt in two
chunks, then single tokens) are those of mlx-vlm's language model, with a third of the layers in memory and within the
smallest budget. mlx-vlm's are computed twice: by its language model, and from embeddings as its ``generate`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import _support  # noqa: F401
import vision_zoo
from equality import told_apart
from outcore import load_model
from outcore.machine.device import COMPUTE_DTYPES
from outcore.modules.mlx_lm_compat import MODEL_TYPES
from result_file import write_result

CHUNKS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [1, 2, 3]]
STEPS = [21, 22, 23]


def theirs(folder: Path) -> tuple[list[mx.array], str]:
    """The logits of mlx-vlm's language model, called with tokens; and how they differ from those that it gives for
    embeddings, as for a prompt without images."""
    import mlx_vlm.utils

    model = mlx_vlm.utils.load_model(folder)
    try:
        expected = _theirs(model, {})
    except (TypeError, AttributeError):  # it needs positions
        expected = []
    for name in ("_position_ids", "_rope_deltas"):  # as in a new process
        if hasattr(model.language_model, name):
            setattr(model.language_model, name, None)
    try:
        prompt = mx.array([[t for ids in CHUNKS for t in ids]])
        found = model.get_input_embeddings(prompt, None, mask=None)
        said = {k: v for k, v in found.to_dict().items() if v is not None}
        got = _theirs(model, said)
        return expected or got, differs(got, expected or got) or "equal"
    except Exception as e:
        if not expected:
            raise
        return expected, f"{type(e).__name__}: {e}"[:200]


def _theirs(model: Any, said: dict[str, Any]) -> list[mx.array]:
    from mlx_vlm.models.cache import make_prompt_cache as their_cache

    cache, out, at = their_cache(model.language_model), list[mx.array](), 0
    for n, ids in enumerate([*CHUNKS, *([s] for s in STEPS)]):
        given = dict(said) if n < len(CHUNKS) else {}
        if given:
            given |= {"inputs_embeds": said["inputs_embeds"][:, at : at + len(ids)], "n_to_process": len(ids)}
        at += len(ids)
        out.append(model.language_model(mx.array([ids]), cache=cache, **given).logits)
        mx.eval(out[-1], [c.state for c in cache])
    return out


def ours(folder: Path, **options: Any) -> tuple[list[mx.array], Any]:
    wanted = {MODEL_TYPES: "vision"}
    model, _ = load_model(folder, draft="none", context=64, prompt=16, model_config=wanted, **options)
    with model.outcore as session:
        cache, out = make_prompt_cache(model), []
        for ids in [*CHUNKS, *([s] for s in STEPS)]:
            out.append(model(mx.array([ids]), cache=cache))
            mx.eval(out[-1], [c.state for c in cache])
        return out, session


def differs(got: list[mx.array], expected: list[mx.array]) -> str | None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.shape != b.shape:
            return f"call {i}: shape {a.shape}, not {b.shape}"
        if not mx.array_equal(a, b, equal_nan=True).item():
            return f"call {i}: by {mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item():.3g}"
    return None


def survey(kind: str, work: Path, dtype: str) -> dict[str, Any]:
    """What one type does; ``failed`` names the first step that did not go, ``why`` says how."""
    if kind in vision_zoo.NO_TEXT:
        return {"equal": False, "failed": "no text", "why": vision_zoo.NO_TEXT[kind]}
    step, row = "built", dict[str, Any]()
    try:
        folder = vision_zoo.save_checkpoint(kind, work / kind, dtype=COMPUTE_DTYPES[dtype])
        step = "mlx-vlm"
        expected, row["embedded"] = theirs(folder)
        row["told_apart"] = told_apart(expected)
        step = "opened"
        found, session = ours(folder, memory="8GB", resident=1, head_resident=False)
        layers, smallest = len(session.size.layers), session.plan.smallest_budget_bytes
        row |= {
            "layers": layers, "streamed": len(session.plan.streamed), "notes": list(session.notes),
            "evaluates": session.profile.trace.evaluates, "head": session.plan.head_streamed,
            "caches": sorted({f.kind for f in session.profile.trace.forms}),
            "split": len(session.profile.trace.pieces),
            "experts": sum(s.experts is not None for s in session.size.layers),
        }  # fmt: skip
        step = "streamed"
        if not session.plan.streamed:
            raise AssertionError("; ".join(session.notes))
        step = "a third resident"
        if layers // 3 > 1:
            found, session = ours(folder, memory="8GB", resident=layers // 3, head_resident=False)
        if (why := differs(found, expected)) is not None:
            raise AssertionError(why)
        step = "smallest budget"
        found, session = ours(folder, memory=smallest)
        row["pools"] = len(session.plan.pools)
        if (why := differs(found, expected)) is not None:
            raise AssertionError(why)
        row["equal"] = True
    except Exception as e:
        row |= {"equal": False, "failed": step, "why": f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]}
        row["trace"] = traceback.format_exc()[-1800:]
    return row


def listed(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows for a result; failures carry the end of their trace only here."""
    return [{"type": kind, **{k: v for k, v in rows[kind].items() if k != "trace"}} for kind in sorted(rows)]


def told(kind: str, row: dict[str, Any], seconds: float) -> str:
    what = "equal" if row["equal"] else f"{row['failed']}: {row['why'][:160]}"
    more = f" (embedded: {row['embedded'][:60]})" if row.get("embedded", "equal") != "equal" else ""
    odd = "" if row.get("told_apart", True) else " NOT TOLD APART"
    return f"{kind:28} {seconds:5.1f} s  {what}{more}{odd}"


def work(kinds: list[str], dtype: str) -> None:
    """Surveys these types and prints each row as a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OUTCORE_HOME", str(Path(folder) / "home"))
        for kind in kinds:
            began = time.monotonic()
            row = survey(kind, Path(folder), dtype)
            shutil.rmtree(Path(folder) / kind, ignore_errors=True)
            print(json.dumps([kind, row, time.monotonic() - began]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    left = arguments.folders or vision_zoo.folders()
    if arguments.work:
        return work(left, arguments.dtype)
    rows: dict[str, Any] = {}
    while left:
        command = [sys.executable, __file__, "--work", "--dtype", arguments.dtype, *left]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                if line.startswith("["):
                    kind, row, seconds = json.loads(line)
                    rows[kind] = row
                    print(told(kind, row, seconds), flush=True)
                    write_result(arguments.json, "vision_types", Path(tempfile.gettempdir()), types=listed(rows))
        left = [kind for kind in left if kind not in rows]
        if left:  # mlx-vlm's own code has ended the process, as by an index out of bounds
            rows[left[0]] = {"equal": False, "failed": "process", "why": f"ended with {worker.returncode}"}
            print(told(left[0], rows[left[0]], 0), flush=True)
            left = left[1:]
    print(sum(r["equal"] for r in rows.values()), "of", len(rows), file=sys.stderr)


if __name__ == "__main__":
    main()
