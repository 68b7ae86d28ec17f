"""mlx-vlm's types, streamed: the logits of a tiny random model of each equal mlx-vlm's own, bit for bit.

    python benchmarks/vision_types.py [FOLDER ...] [--of new|both|all] [--texts|--singly] [--dtype float32]
        [--bits 4 --group 32 [--recipe mixed_3_6]] [--json FILE]

For each model folder of mlx-vlm: whether a tiny checkpoint can be made here, and whether its logits (a prompt in two
chunks, then single tokens) are those of mlx-vlm's language model, with a third of the layers in memory and within the
smallest budget. mlx-vlm's are computed twice: by its language model, and from embeddings as its ``generate`` does.

``--of`` says which folders: ``new`` are those that mlx-lm lacks, ``both`` the others. A checkpoint of these has the
tensor names that mlx-lm writes, if mlx-vlm opens it, else mlx-vlm's. mlx-lm opens it, too, and its logits are compared
with mlx-vlm's; ``vlm_names`` says whether Outcore opens one with mlx-vlm's names without being told so. ``--bits``
quantizes as ``mlx_vlm.convert`` does, with the model's own choice of modules or with one of mlx-vlm's mixed recipes.
Where a layer has matrices by expert, single experts have to be read, whose bytes are counted; ``--singly`` looks at
nothing else. Each row is written to FILE at once; a run that was ended goes on where it stopped, if the file is of the
same commit and command.
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
from typing import Any, cast
from unittest import mock

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import _support  # noqa: F401
import vision_zoo
from equality import _by_sweeps, told_apart
from outcore import load_model
from outcore.decode.preparation import prepare
from outcore.machine.device import COMPUTE_DTYPES
from outcore.modules.mlx_lm_compat import MODEL_TYPES
from outcore.plan.planner import resident_budget
from outcore_experts import experts
from outcore_vision.names import FOLDERS
from outcore_vision.text_model import GIVEN
from result_file import document_of, write_result

CHUNKS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [1, 2, 3]]
STEPS = [21, 22, 23]

# Tokens after these, of which the second half is counted.
COUNTED = [31, 12, 7, 50, 45, 3, 21, 22]


def theirs(folder: Path) -> tuple[list[mx.array], str]:
    """The logits of mlx-vlm's language model, called with tokens; and how they differ from those that it gives for
    embeddings, as for a prompt without images. Of a model that scales given embeddings only: for embeddings."""
    import mlx_vlm.utils

    model = mlx_vlm.utils.load_model(folder)
    scaled = f".{type(model).__module__.split('.')[-2]}" in GIVEN
    try:
        expected = [] if scaled else _theirs(model, {})
    except (TypeError, AttributeError):  # it needs positions
        expected = []
    for name in ("_position_ids", "_rope_deltas"):  # as in a new process
        if hasattr(model.language_model, name):
            setattr(model.language_model, name, None)
    try:
        prompt = mx.array([[*(t for ids in CHUNKS for t in ids), *(STEPS if scaled else [])]])
        found = model.get_input_embeddings(prompt, None, mask=None)
        said = {k: v for k, v in found.to_dict().items() if v is not None}
        got = _theirs(model, said, len(CHUNKS) + len(STEPS) * scaled)
        return expected or got, differs(got, expected or got) or "equal"
    except Exception as e:
        if not expected:
            raise
        return expected, f"{type(e).__name__}: {e}"[:200]


def _theirs(model: Any, said: dict[str, Any], passes: int = len(CHUNKS)) -> list[mx.array]:
    """``said``: the embeddings of what the first ``passes`` are given."""
    from mlx_vlm.models.cache import make_prompt_cache as their_cache

    cache, out, at = their_cache(model.language_model), list[mx.array](), 0
    for n, ids in enumerate([*CHUNKS, *([s] for s in STEPS)]):
        given = dict(said) if n < passes else {}
        if given:
            given |= {"inputs_embeds": said["inputs_embeds"][:, at : at + len(ids)], "n_to_process": len(ids)}
        at += len(ids)
        out.append(model.language_model(mx.array([ids]), cache=cache, **given).logits)
        mx.eval(out[-1], [c.state for c in cache])
    return out


def ours(folder: Path, wanted: str | None = "vision", **options: Any) -> tuple[list[mx.array], Any]:
    config = {MODEL_TYPES: wanted} if wanted else None
    model, _ = load_model(folder, draft="none", context=64, prompt=16, model_config=config, **options)
    with model.outcore as session:
        cache, out = make_prompt_cache(model), []
        for ids in [*CHUNKS, *([s] for s in STEPS)]:
            out.append(model(mx.array([ids]), cache=cache))
            mx.eval(out[-1], [c.state for c in cache])
        return out, session


def stacked(session: Any) -> int:
    """How many layers have matrices by expert: of three dimensions, and not by head or of a convolution."""
    where = session.profile.place.where
    return sum(
        any(
            len(where[f"{layer.path}.{p.path}"].shape) == 3
            and not any(kind in type(p.module).__name__ for kind in ("Conv", "MultiLinear"))
            for p in layer.parameters
            if f"{layer.path}.{p.path}" in where
        )
        for layer in session.profile.layers
    )


def of_experts(folder: Path, expected: list[mx.array], memory: int, **more: Any) -> dict[str, Any]:
    """What a model that reads experts one by one reads for a token, in bytes: the units of other weights, and the
    experts that are missing. Calls are interrupted at their first or second router, and made again.

    Raises:
        AssertionError: logits differ, or single experts are not read.
    """
    model, _ = load_model(
        folder, draft="none", context=64, prompt=16, model_config={MODEL_TYPES: "vision"}, memory=memory, **more
    )
    with model.outcore as session:
        if not session.plan.pools:
            raise AssertionError("this budget has no plan for single experts")
        session.streaming.experts.prefetch = None  # so each miss is one read
        cache, out, stopped = make_prompt_cache(model), list[mx.array](), 0
        for n, ids in enumerate([*CHUNKS, *([s] for s in STEPS)]):
            checks = [None] * (n % min(2, len(session.plan.pools))) + [KeyboardInterrupt, *[None] * 1000]
            try:
                with mock.patch.object(experts, "check", mock.Mock(side_effect=checks)):
                    out.append(model(mx.array([ids]), cache=cache))
            except KeyboardInterrupt:
                stopped += 1
                out.append(model(mx.array([ids]), cache=cache))
            mx.eval(out[-1], [c.state for c in cache])
        if (why := differs(out, expected)) is not None:
            raise AssertionError(why)
        metrics, sizes = session.metrics, session.size.layers
        for n, token in enumerate(COUNTED):  # the first still finds what was begun for longer passes
            if n == len(COUNTED) // 2:
                metrics.reset()
            mx.eval(model(mx.array([[token]]), cache=cache))
        tokens = len(COUNTED) - len(COUNTED) // 2
        units = session.streaming.layers.units
        each = max(s.experts.read for s in sizes if s.experts is not None)
        missed = metrics.experts.read
        return {
            "memory": memory, "slots": [n for _, n in session.plan.pools], "interrupts": stopped,
            "read": metrics.bytes_read // tokens, "trunk": sum(u.unit.slot_bytes for u in units if not u.experts),
            "missed": missed * each // tokens, "used": metrics.experts.used / tokens, "misses": missed / tokens,
        }  # fmt: skip


def one_by_one(folder: Path, expected: list[mx.array], most: int) -> list[dict[str, Any]]:
    """Of a budget with room for one expert of each layer, and of one a third of the way to ``most``: see above."""
    how: dict[str, Any] = {"context": 64, "prompt": 16, "model_config": {MODEL_TYPES: "vision"}, "experts": 1}
    least = prepare(folder, memory=1, least=True, **how).plan.budget_bytes
    third = [of_experts(folder, expected, least + (most - least) // 3)] if most > least else []
    return [of_experts(folder, expected, least, experts=1), *third]


def differs(got: list[mx.array], expected: list[mx.array]) -> str | None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.shape != b.shape:
            return f"call {i}: shape {a.shape}, not {b.shape}"
        if not mx.array_equal(a, b, equal_nan=True).item():
            return f"call {i}: by {mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item():.3g}"
    return None


def in_mlx_lm(folder: Path, expected: list[mx.array]) -> str:
    """How mlx-lm's logits for a checkpoint differ from mlx-vlm's; "equal", or why it does not open it."""
    import mlx_lm.utils

    try:
        model, _ = mlx_lm.utils.load_model(folder)
        got = [a.astype(expected[0].dtype) for a in _by_sweeps(model, CHUNKS, STEPS)]
        if (why := differs(got, expected)) is None:
            return "equal"
        worst = max(cast(float, mx.abs(a - b).max().item()) for a, b in zip(got, expected, strict=True))
        same = all(mx.array_equal(a.argmax(-1), b.argmax(-1)).item() for a, b in zip(got, expected, strict=True))
        return f"{'same' if same else 'other'} tokens, {worst:.2g} apart ({why})"
    except (Exception, SystemExit) as e:
        return shortly(e)


def of_both(kind: str, work: Path, texts: bool = False, **how: Any) -> tuple[Path, list[mx.array], dict[str, Any]]:
    """A checkpoint of a type that both libraries know, mlx-vlm's logits, and what mlx-lm's are beside them.
    ``texts``: nothing else."""
    found: list[tuple[Path, list[mx.array], dict[str, Any]]] = []
    failed: dict[str, BaseException] = {}
    for names in ("mlx-lm", "mlx-vlm"):
        if found and texts:
            break
        try:
            folder = vision_zoo.save_checkpoint(kind, work / names, named_by=names, **how)
            expected, embedded = theirs(folder)
            found.append((folder, expected, {"names": names, "embedded": embedded}))
        except (Exception, SystemExit) as e:  # importing mlx-lm's olmo ends the process
            failed[names] = e
    if not found:
        raise failed["mlx-vlm"]
    folder, expected, row = found[0]
    row["mlx_lm"] = in_mlx_lm(folder, expected)
    row |= {f"not_{names}": shortly(e) for names, e in failed.items()}
    if not texts and "mlx-vlm" not in failed:
        row["vlm_names"] = by_default(found[-1][0], found[-1][1])
    return folder, expected, row


def by_default(folder: Path, expected: list[mx.array]) -> str:
    """What Outcore makes of a checkpoint that names no library."""
    try:
        found, _ = ours(folder, wanted=None, memory="8GB", resident=1)
    except (Exception, SystemExit) as e:
        return shortly(e)
    return differs(found, expected) or "equal"


def shortly(e: BaseException) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())}"[:200]


def survey(
    kind: str, work: Path, dtype: str, texts: bool = False, singly: bool = False, **quantized: Any
) -> dict[str, Any]:
    """What one type does; ``failed`` names the first step that did not go, ``why`` says how."""
    if kind in vision_zoo.NO_TEXT:
        return {"equal": False, "failed": "no text", "why": vision_zoo.NO_TEXT[kind]}
    step, row = "built", dict[str, Any]()
    try:
        if kind in FOLDERS:
            folder = vision_zoo.save_checkpoint(kind, work / kind, dtype=COMPUTE_DTYPES[dtype], **quantized)
            step = "mlx-vlm"
            expected, row["embedded"] = theirs(folder)
        else:
            folder, expected, more = of_both(kind, work / kind, dtype=COMPUTE_DTYPES[dtype], texts=texts, **quantized)
            row |= more
        row["told_apart"] = told_apart(expected)
        if texts:
            return row | {"equal": row["mlx_lm"] == "equal", "failed": "mlx-lm", "why": row["mlx_lm"]}
        step = "opened"
        found, session = ours(folder, memory="8GB", resident=1, head_resident=False)
        layers, smallest = len(session.size.layers), session.plan.smallest_budget_bytes
        row |= {
            "layers": layers, "streamed": len(session.plan.streamed), "notes": list(session.notes),
            "evaluates": session.profile.trace.evaluates, "head": session.plan.head_streamed,
            "caches": sorted({f.kind for f in session.profile.trace.forms}),
            "split": len(session.profile.trace.pieces),
            "experts": sum(s.experts is not None for s in session.size.layers), "stacked": stacked(session),
        }  # fmt: skip
        step = "streamed"
        if not session.plan.streamed:
            raise AssertionError("; ".join(session.notes))
        if not singly:
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
        if row["stacked"]:
            step = "single experts"
            if row["experts"] < row["stacked"]:
                raise AssertionError("layers are read whole")
            row["one_by_one"] = one_by_one(folder, expected, resident_budget(session.size))
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
    other = (
        f" (mlx-lm: {row['mlx_lm'][:60]}; mlx-vlm's names: {row.get('vlm_names', '-')[:60]})" if "mlx_lm" in row else ""
    )
    return f"{kind:28} {seconds:5.1f} s  {what}{more}{odd}{other}"


def work(kinds: list[str], dtype: str, **quantized: Any) -> None:
    """Surveys these types and prints each row as a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OUTCORE_HOME", str(Path(folder) / "home"))
        for kind in kinds:
            began = time.monotonic()
            row = survey(kind, Path(folder), dtype, **quantized)
            shutil.rmtree(Path(folder) / kind, ignore_errors=True)
            print(json.dumps([kind, row, time.monotonic() - began]), flush=True)


def chosen(of: str) -> list[str]:
    return [k for k in vision_zoo.folders() if of == "all" or (k in FOLDERS) == (of == "new")]


def begun(file: Path | None) -> dict[str, Any]:
    """The rows of an earlier run of this commit with these arguments."""
    if file is None or not file.exists():
        return {}
    earlier, now = json.loads(file.read_text()), document_of("vision_types", Path(tempfile.gettempdir()))
    same = earlier["command"] == now["command"]
    same = same and earlier["machine"]["git_commit"] == now["machine"]["git_commit"]
    return {row.pop("type"): row for row in earlier["types"]} if same else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--of", choices=("new", "both", "all"), default="new")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--recipe")
    parser.add_argument("--singly", action="store_true", help="of mixtures: only whether single experts are read")
    parser.add_argument("--texts", action="store_true", help="of types in both: only how the libraries differ")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    left = arguments.folders or chosen(arguments.of)
    if arguments.work:
        quantize = {"bits": arguments.bits, "group_size": arguments.group} if arguments.bits else None
        how = {name: vars(arguments)[name] for name in ("recipe", "texts", "singly")}
        return work(left, arguments.dtype, quantize=quantize, **how)
    rows = begun(arguments.json)
    left = [kind for kind in left if kind not in rows]
    options = [w for k in ("dtype", "bits", "group", "recipe") if (v := vars(arguments)[k]) for w in (f"--{k}", str(v))]
    options += [f"--{name}" for name in ("texts", "singly") if vars(arguments)[name]]
    while left:
        command = [sys.executable, __file__, "--work", *options, *left]
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
    write_result(arguments.json, "vision_types", Path(tempfile.gettempdir()), types=listed(rows))
    print(sum(r["equal"] for r in rows.values()), "of", len(rows), file=sys.stderr)


if __name__ == "__main__":
    main()
