"""``outcore doctor``: checks within 20 seconds that Outcore works on this machine, and says what to do if not."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from outcore.checkpoint.checkpoint import CONFIG
from outcore.checkpoint.find_model import resolve_model
from outcore.checkpoint.packed_store import open_model
from outcore.cli.console import console
from outcore.cli.engine import ProgressBar
from outcore.decode.loader import load_model
from outcore.decode.preparation import prepare
from outcore.disk.disk_probe import REWRITES, unseen_rewrites, wrong_reads
from outcore.disk.reader import FileReader
from outcore.errors import OutcoreError, StoreError
from outcore.machine.cache_folder import make_cache
from outcore.machine.device import metal_info, most_slot_bytes
from outcore.machine.hardware import cpu_name, gpu_name
from outcore.machine.memory import default_budget, wired_limit
from outcore.machine.random_state import random_state_kept
from outcore.modules.mlx_lm_compat import classes_of
from outcore.sizes import format_size
from outcore.text import one_line
from outcore.version import __version__
from outcore_calibrate.disk_rate import scratch_file

REPORT = "please report this output"
VERDICTS = {True: "ok", False: "FAILED", None: "note"}

SCRATCH_BYTES = 512 << 20

WORKING_SET = "recommended working set"


@dataclass(frozen=True)
class Finding:
    """The result of a check. ``ok`` is None if nothing is wrong but something is worth knowing."""

    name: str
    ok: bool | None
    found: str
    advice: str = ""


# What a check returns: the fields of ``Finding`` after its name.
Verdict = tuple[bool | None, str] | tuple[bool | None, str, str]


def run(args: argparse.Namespace) -> int:
    model = resolve_model(args.model, args.revision) if args.model is not None else None
    began, budget = time.perf_counter(), default_budget()
    with ProgressBar() as bar:
        findings = examine(model, bar.count)
    out = console()
    out.print(
        f"Outcore {__version__}, MLX {version('mlx')} on {gpu_name() or 'the CPU'}; {cpu_name()}, {platform.system()} "
        f"{platform.release()} {platform.machine()}; default --memory {format_size(budget)}\n"
    )
    for f in findings:
        out.print(f"{VERDICTS[f.ok]:6} {f.name}: {f.found}" + (f"\n       → {f.advice}" if f.advice else ""))
    failed = [f.name for f in findings if f.ok is False]
    wrong = f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}. See above for what to do."
    out.print(f"\n{wrong if failed else f'All {len(findings)} checks passed.'}")
    args.result.record = {
        "findings": [asdict(f) for f in findings],
        "failed": failed,
        "seconds": time.perf_counter() - began,
        "default_budget_bytes": budget,
    }
    return 1 if failed else 0


def examine(model: Path | None = None, progress: Callable[[str, int, int], None] = lambda *_: None) -> list[Finding]:
    """Runs all checks, on the model's files and plan if a model is given. A check that raises has failed."""
    findings = []
    with _file_of(model) as file:
        for n, (name, check) in enumerate(CHECKS.items()):
            progress(name, n, len(CHECKS))
            try:
                findings.append(Finding(name, *check(file, model)))
            except Exception as e:  # a broken machine may raise anything, and the other checks still matter
                error = one_line(e) if isinstance(e, OutcoreError) else f"{type(e).__name__}: {one_line(e)}"
                findings.append(Finding(name, False, error, REPORT))
    return findings


@contextlib.contextmanager
def _file_of(model: Path | None) -> Iterator[Path]:
    if model is not None:
        yield max(open_model(model).checkpoint.files, key=lambda f: f.stat().st_size)
        return
    try:
        folder = make_cache()
    except (OutcoreError, OSError):
        folder = Path(tempfile.gettempdir())
    with scratch_file(folder, nbytes=SCRATCH_BYTES) as path:
        yield path


def _slots(file: Path, model: Path | None) -> Verdict:
    if unseen := unseen_rewrites():
        advice = f"streaming does not work on this device, answers would be wrong; {REPORT}"
        return False, f"{unseen} of {REWRITES} rewrites were not seen by the device", advice
    return True, f"{REWRITES} of {REWRITES} rewrites were seen by the device"


def _offsets(file: Path, model: Path | None) -> Verdict:
    if wrong := sorted({*wrong_reads(file), *wrong_reads(file, "cached")}):
        places = ", ".join(f"{offset} (alignment {align}, {way})" for offset, align, way in wrong[:4])
        cached = "try --io cached, and " if {way for _, _, way in wrong} == {"direct"} else ""
        return False, f"wrong bytes from offset {places}", f"answers would be wrong; {cached}{REPORT}"
    return True, "all bytes right, at odd offsets too"


def _direct(file: Path, model: Path | None) -> Verdict:
    with contextlib.closing(FileReader([file], threads=1)) as reader:
        direct = reader.direct
    return (True, "bypass the page cache") if direct else (None, "not possible here, so reads use the page cache")


def device_limits() -> dict[str, int]:
    """Returns the limits that MLX and the system report for the device, in bytes.

    The largest slot includes its alignment. The working set is Metal's recommended maximum; the wired limit is the
    memory that the user lets the GPU wire (``iogpu.wired_limit_mb``).
    """
    metal = metal_info()
    known = {
        "largest slot": most_slot_bytes(),
        "largest buffer": int(metal.get("max_buffer_length", 0)),
        WORKING_SET: int(metal.get("max_recommended_working_set_size", 0)),
        "wired limit": wired_limit() or 0,
    }
    return {name: nbytes for name, nbytes in known.items() if nbytes}


def _limits(file: Path, model: Path | None) -> Verdict:
    limits = device_limits()
    found = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in limits.items())
    if model is None:
        return True, found
    prepared = prepare(model, least=True)
    peak = prepared.plan.peak_bytes
    found += f"; this model without --memory: peak {format_size(peak)}"
    if peak > limits.get(WORKING_SET, peak):
        advice = (
            f"give --memory {format_size(limits[WORKING_SET])} or less; more cannot stay wired and would be very slow"
        )
        return False, found, advice
    if prepared.refused is not None:
        return False, prepared.refused, "close other programs, or give a smaller context"
    return True, found


def _answers(file: Path, model: Path | None) -> Verdict:
    try:
        with tempfile.TemporaryDirectory(prefix="outcore-doctor-") as folder:
            save_random_checkpoint(Path(folder))
            streamed, resident = _logits(folder, 0), _logits(folder, None)
    except OSError as e:
        raise StoreError(
            f"cannot write a small test model ({e.strerror or e}); set TMPDIR to a writable folder with 20 MB free"
        ) from e
    if not np.array_equal(streamed, resident) or not np.isfinite(resident).all():
        return False, "streamed logits differ from the resident ones", f"do not use Outcore here; {REPORT}"
    return True, f"model of random weights: all {resident.size} logits bit-equal, streamed and resident"


def _logits(folder: str, layers: int | None) -> Any:
    model, _ = load_model(folder, resident=layers, memory="400MB", context=8, prompt=4, draft="none")
    with model.outcore as session:
        assert (session.streaming is None) == (layers is None)
        calls = [model(mx.array([[5, 7, 11, 13]])) for _ in range(2)]
        return np.array(mx.stack(calls).astype(mx.float32))


# The checks in order. Each takes the file to read, and the model's folder if one was given.
CHECKS: dict[str, Callable[[Path, Path | None], Verdict]] = {
    "slots": _slots,
    "offsets": _offsets,
    "direct reads": _direct,
    "limits": _limits,
    "answers": _answers,
}


_LAYERS, _BITS, _GROUP = 8, 4, 64

# As the demo model, with half of its layers: one of attention after every three recurrent ones.
_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 768,
    "num_hidden_layers": _LAYERS, "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2],
    },
}  # fmt: skip


def save_random_checkpoint(folder: Path) -> Path:
    """Writes a 10 MB checkpoint with 4-bit random weights, the same each time; raises OSError if that fails.

    Computes on the CPU: a GPU would compile kernels for this alone.
    """
    config: dict[str, Any] = {"model_type": "qwen3_5", "text_config": _TEXT, "tie_word_embeddings": True}
    model_class, args_class = classes_of(config)
    with random_state_kept(), mx.stream(mx.cpu):
        mx.random.seed(0)
        # from_dict may change its argument.
        model = model_class(args_class.from_dict(json.loads(json.dumps(config))))  # type: ignore[attr-defined]
        nn.quantize(model, _GROUP, _BITS)
        weights = dict(tree_flatten(model.parameters()))
        mx.eval(weights)
    try:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    except RuntimeError as e:  # MLX raises this for a file that cannot be written
        raise OSError(f"{folder}: {e}") from e
    (folder / CONFIG).write_text(json.dumps(config | {"quantization": {"group_size": _GROUP, "bits": _BITS}}))
    return folder
