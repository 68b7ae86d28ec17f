"""``outcore draft train``: collects a model's hidden states on continuations of given text, and trains a drafter."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import outcore
from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.find_model import name_of, resolve_model
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.checks import parse_size, real, whole
from outcore.cli.engine import ProgressBar
from outcore.cli.flags import loading_options
from outcore.cli.output import tell
from outcore.decode.budget import given_budget
from outcore.decode.sampling import make_sampler
from outcore.errors import BudgetError, StoreSpaceError, UnsupportedModelError, UsageError
from outcore.machine.allocator import Needs, limits
from outcore.machine.device import on_cpu
from outcore.options import AUTO
from outcore.plan.joint_plan import NONE
from outcore.sizes import format_size
from outcore.text import printable

from .config import config_of, is_drafter
from .published import trained_values
from .train import collect, drafter_files, texts
from .train.network import Network, Shape
from .train.products import fast_quantized
from .train.sizes import (
    beside_bytes,
    disk_shares,
    drafter_bytes,
    drafter_shape,
    fitted,
    sizes_of,
    step_bytes,
    tables_of,
    text_bytes,
    usual_width,
)
from .train.training import DEPTH, TRIED, Progress, Trainer, is_held_out
from .train.work_folder import WORK, WorkFolder

# Tokens of a piece of text that the model continues.
PROMPT = 128

# A pass that verifies guesses takes so many times a plain one where the disk is the limit (dev/log/drafts.md).
LONGER = 1.07

# A disk with less room than this is full.
LEAST_ROOM = 1 << 20

# Bytes of a file beside its arrays, and of settings that are written with it, at most.
BESIDE = 8192

# Embeddings that are read from disk at a time.
ROWS_READ = 8192

# Texts in a training step, at most: on a GPU, and on a CPU, whose steps are slow.
ROWS, CPU_ROWS = 32, 4

# Texts that share a pass of the model: the first of these for which there is memory. (MLX 0.32.4 on CUDA refuses some
# kernels of 256 texts of a recurrent model: cudaGraphAddKernelNode, invalid argument.)
TOGETHER = (64, 32, 16, 8, 4, 2, 1)


def run(args: argparse.Namespace) -> None:
    check_arguments(args)
    out = Path(args.output)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--output {printable(str(out))}: is a file; give a folder")
    if (out / "config.json").exists():
        if not is_drafter(config_of(out)):
            raise UsageError(f"--output {printable(str(out))}: holds a model; give a new folder")
        WorkFolder(out / WORK).remove()  # of a run that was killed when the drafter was there
        tell(f"{printable(str(out))}: a drafter is already there; give a new folder to train another")
        return
    files = texts.text_files(args.input)
    folder, work = resolve_model(args.model, args.revision), WorkFolder(out / WORK)
    job = Job(args, folder, work, files)
    try:
        with ProgressBar() as bar:
            progress = job.run(bar)
        mx.clear_cache()
        _save(args, job, progress, folder, out)
        work.remove()
    except KeyboardInterrupt:
        if work.settings is not None:
            tell(f"{printable(str(work.path))}: what is done is kept; give the same command again to go on")
        raise
    except (OSError, RuntimeError) as error:
        # MLX reports a full disk as a RuntimeError.
        if work.free_bytes < LEAST_ROOM:
            said = f"{printable(str(out))}: the disk is full; free some, and give the same command again"
            raise StoreSpaceError(said) from error
        raise
    finally:
        work.close()


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ``UsageError`` for numbers that mean nothing, before anything is loaded."""
    real("--minutes", args.minutes, 1e-3, 1e6)
    real("--share", args.share or 0.0, 0.0, 1.0)
    real("--temp", args.temp or 0.0, 0.0)
    whole("--max-tokens", args.max_tokens, 2)
    whole("--seed", args.seed or 0, 0, 2**32 - 1)
    parse_size(args.disk, flag="--disk")


def _save(args: argparse.Namespace, job: Job, progress: Progress, folder: Path, out: Path) -> None:
    shape = job.shape
    facts = {
        "form": "EAGLE-3, one layer",
        "size in 4 bits": format_size(round(drafter_bytes(shape))),
        "tokens a pass, on held-out texts": progress.best,
        "texts": f"{job.shards.count * job.texts} of {PROMPT} + {args.max_tokens} tokens",
        "drawn from, also those held out": format_size(job.input_bytes),
        "steps": progress.steps,
        "written while training": format_size(job.work.written),
    }
    made = drafter_files.config_of(shape, job.model_type, job.layers, job.positions, DEPTH)
    made |= trained_values(progress.best, TRIED)
    named = [str(path) for path in args.input]
    drafter_files.save(out, job.net, made, drafter_files.card(name_of(folder), named, facts))
    counted, pays = f"{progress.best:.2f} tokens a pass on held-out texts", progress.best >= job.pays_from
    less = f"does not pay: {counted}, and it needs {job.pays_from:.2f}; train longer or on more text"
    print(f"{printable(str(out))}: {f'{counted}; use it with --draft {out}' if pays else less}")
    written = job.work.written + (out / drafter_files.WEIGHTS).stat().st_size
    record = {"folder": str(out), "bytes": written, "history": progress.history, "pays_from": job.pays_from}
    args.result.record = record | facts


class Job:
    """One training: its model, its texts and its files.

    Args:
        work: the folder of what a resumed training needs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, work: WorkFolder, files: list[Path]) -> None:
        self._args, self._folder, self.work, self._files = args, folder, work, files
        self._seed = 0 if args.seed is None else args.seed
        self.input_bytes = sum(file.stat().st_size for file in files)  # once trained, the texts may be gone
        self._model_bytes = open_checkpoint(folder).nbytes
        self._length = PROMPT + args.max_tokens
        self._collected_s = 0.0  # spent on the files of states that are there

    def run(self, bar: ProgressBar) -> Progress:
        args = self._args
        self._tokenizer: Any = load_tokenizer(self._folder)
        self._tokenizer = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
        texts.pieces(
            self._tokenizer, self._files, 1, PROMPT, [self._seed], held_out=False
        )  # or there is too little text
        self._memory, self._known = given_budget(args.memory), self.work.settings
        model = self._load()
        try:
            self._measure(model)
            rows = self._rows()
            self._check()
            self._collect(model, bar)
        finally:
            model.outcore.close()
        del model
        gc.collect()  # a resident model's modules are in cycles
        mx.clear_cache()
        mx.random.seed(self._seed)  # the first weights are the same whether texts were collected in this run or before
        self.net = Network(self.shape, self._norm)

        def report(progress: Progress, now: dict[str, float]) -> None:
            left = max(0.0, args.minutes - now["seconds"] / 60)
            tell(
                f"{now['seconds'] / 60:.0f} min: loss {now['loss']:.2f}, {now['tokens_a_pass']:.2f} tokens a pass on "
                f"held-out texts, at most {left:.0f} min left"
            )

        trainer = Trainer(
            self.net, self._table, self._head, self.shards, prompt=PROMPT, ends=self._ends, rows=rows,
            seconds=args.minutes * 60, work=self.work, seed=self._seed, report=report,
            every=args.minutes * 60 / self._saves,
            step_done=lambda p: bar.count("training", round(p.seconds), round(args.minutes * 60), f"loss {p.loss:.2f}"),
        )  # fmt: skip
        release = limits.hold(trainer, Needs(memory=self._memory, waits=True))  # freed memory, too, keeps to it
        try:
            return trainer.run()
        finally:
            release()

    def _load(self) -> Any:
        """Loads the model with room for as many texts in a pass as the memory allows."""
        options = loading_options(self._args) | {"draft": NONE, "context": self._length}
        options |= {"govern": False, "head_resident": True}  # tapped layers stay streamed, or resident
        tables, texts_each = beside_bytes(self._folder), self._known["texts"] if self._known else 0
        states = 2 * texts_each * text_bytes(sizes_of(self._folder).get("hidden_size", 0), self._length)
        for self._together in TOGETHER:
            # A training that was begun with more memory joins the states of several passes.
            beside = tables + (states if texts_each > self._together else 0)
            options["memory"] = max(1, self._memory - beside)
            try:
                model, _ = outcore.load_model(str(self._folder), **options, batch=self._together)
                return model
            except BudgetError as e:
                if self._together == TOGETHER[-1]:
                    if e.smallest is None:
                        raise
                    least = max(e.smallest + beside, self._least())
                    why = f"too small to collect the model's states and train; give {format_size(least, round_up=True)}"
                    raise BudgetError(f"--memory {self._args.memory or AUTO}: {why}", least) from e
        raise AssertionError

    def _least(self) -> int:
        """Returns the bytes that training needs, from the model's config; 0: it does not say."""
        match sizes_of(self._folder):
            case {"hidden_size": int(hidden), "vocab_size": int(vocabulary), "num_hidden_layers": int(layers)}:
                tables = vocabulary * hidden * (4 if on_cpu() else 2) * tables_of(self._folder)
                return tables + sum(step_bytes(self._shape(hidden, vocabulary, layers, 0), self._length, 1))
        return 0

    def _shape(self, hidden: int, vocabulary: int, layers: int, room: int) -> Shape:
        """Returns the shape of the drafter that is trained in ``room`` bytes beside the tables."""
        share = self._args.share
        shape = drafter_shape(self._folder, hidden, vocabulary, layers, share)
        if self._known is not None:
            return replace(shape, intermediate=self._known["inner"] or shape.intermediate)
        return shape if share is not None else fitted(shape, room, self._length)

    def _measure(self, model: Any) -> None:
        text = getattr(model, "language_model", model)
        if not all(hasattr(getattr(text, "model", None), each) for each in ("embed_tokens", "layers", "norm")):
            raise UnsupportedModelError(f"{self._folder}: published drafters cannot draft for models of this type")
        inner, self.model_type = text.model, config_of(self._folder)["model_type"]
        self.layers = len(inner.layers)
        self.positions = sizes_of(self._folder).get("max_position_embeddings", 4096)
        dtype = mx.float32 if on_cpu() else mx.bfloat16
        own_head = "lm_head" in text
        self._head = _dense(text.lm_head if own_head else inner.embed_tokens).astype(dtype)
        self._norm = mx.array(inner.norm.weight).astype(mx.float32)
        mx.eval(self._head, self._norm)
        self._table = _embeddings(inner.embed_tokens, len(self._head)).astype(dtype) if own_head else self._head
        mx.eval(self._table)
        vocabulary, hidden = self._table.shape
        self._tables = self._table.nbytes + (self._head.nbytes if own_head else 0)
        self.shape = self._shape(hidden, vocabulary, self.layers, self._memory - self._tables)
        self._ends = sorted({e for e in _ends(self._folder) if e is not None})

    def _check(self) -> None:
        """Chooses how many texts fit on the disk, and refuses other settings than a begun training's."""
        args, shape = self._args, self.shape
        row = text_bytes(shape.hidden, self._length)
        disk, room = parse_size(args.disk, flag="--disk"), self.work.free_bytes + self.work.own_bytes
        if disk > room:
            raise UsageError(f"--disk {args.disk}: {format_size(room)} are free there")
        # Half of what may be written is for weights, or what two evaluations need; the rest is for states.
        limit, self._saves = disk_shares(disk, shape.parameters)
        self.work.most, self._states_most = disk - 2 * shape.parameters - BESIDE, limit
        known = self._known
        # A file's texts are those of a pass, so that no more states than its own are in memory.
        self.texts = known["texts"] if known else max(1, min(self._together, (limit // 2 - BESIDE) // row))
        self._file_bytes = row * self.texts + BESIDE
        count = known["count"] if known else limit // self._file_bytes
        if count < 2:
            needs = max(disk - limit, 2 * self._file_bytes) + 2 * self._file_bytes
            raise UsageError(f"--disk {args.disk}: give at least {format_size(needs, round_up=True)}")
        self.shards = collect.Shards(self.work.states, int(count))
        self._used = {
            "model": str(self._folder), "share": args.share, "tokens": args.max_tokens, "temp": args.temp or 0.0,
            "seed": self._seed, "texts": self.texts, "disk": args.disk,
            "input": hashlib.sha256("\n".join(f"{f}:{f.stat().st_size}" for f in self._files).encode()).hexdigest(),
        }  # fmt: skip
        if known is not None:
            self._collected_s = known["seconds"]
            if known != self._used | {key: known[key] for key in ("count", "seconds", "inner")}:
                raise UsageError(f"{printable(str(self.work.path))}: begun with other settings; give another --output")
        self._begin()
        most = self.shards.count * self.texts
        tell(
            f"the drafter {self._price()}. First hidden states are collected, for at most {args.minutes:g} min, "
            f"{most} texts and {format_size(most * row)}; then the drafter is trained, for at most {args.minutes:g} min"
        )

    def _begin(self) -> None:
        made = {"count": self.shards.count, "seconds": self._collected_s, "inner": self.shape.intermediate}
        self.work.begin(self._used | made)

    @property
    def pays_from(self) -> float:
        """The tokens a pass from which the drafter's bytes are better spent so than on the model's weights, of which
        each pass then reads so many more."""
        missing = self._model_bytes - self._memory
        return LONGER * (1 + drafter_bytes(self.shape) / missing) if missing > 0 else LONGER

    def _price(self) -> str:
        takes = drafter_bytes(self.shape)
        said = f"takes {format_size(round(takes))} in 4 bits, {100 * takes / self._memory:.1f} % of the memory"
        if self._args.share is None and self.shape.intermediate < usual_width(self.shape.hidden):
            said += " (less than usual, to be trained in it)"
        if self._memory < self._model_bytes:
            return f"{said}, and pays from {self.pays_from:.2f} tokens a pass"
        return f"{said}; it pays where several tokens are computed nearly as fast as one, as the model needs no disk"

    def _collect(self, model: Any, bar: ProgressBar) -> None:
        if not (missing := self.shards.missing):
            return
        args, most_s, began = self._args, round(self._args.minutes * 60), time.monotonic() - self._collected_s
        draw = make_sampler(temp=args.temp or 0.0)
        layers = getattr(model, "language_model", model).model.layers
        resident = not model.outcore.plan.streams
        for n in missing:
            passed = time.monotonic() - began
            written = self.work.written + self._file_bytes  # more than planned where a kill interrupted files
            if written > self.work.most and n < 2:
                said = f"--disk {args.disk}: interrupted runs have written {format_size(self.work.written)} of it"
                raise UsageError(f"{said}; give another --output")
            if (passed > most_s or written > self._states_most) and n >= 2:
                self.shards.count = n
                self._begin()
                break
            bar.count(f"hidden states, {n * self.texts} texts", min(round(passed), most_s), most_s)
            mx.random.seed(self._seed * 1_000_003 + n)
            prompts = texts.pieces(
                self._tokenizer, self._files, self.texts, PROMPT, [self._seed, n], held_out=is_held_out(n)
            )
            passes = list[dict[str, mx.array]]()
            for at in range(0, self.texts, self._together):
                some = prompts[at : at + self._together]
                with fast_quantized(evaluated=resident):
                    made = collect.continue_texts(model, layers, self.shape.tapped, some, args.max_tokens, draw)
                passes.append(made)
            made = {key: mx.concatenate([each[key] for each in passes]) for key in made} if passes[1:] else made
            self.work.write(self.shards.path(n), made)
            self._collected_s = time.monotonic() - began
            self._begin()
            mx.clear_cache()

    def _rows(self) -> int:
        """Returns texts in a step, and takes no more texts into a file than leave room for one. Raises ``BudgetError``
        if not even one text fits."""
        known = self._known
        for texts_each in [known["texts"]] if known else [n for n in TOGETHER if n <= self._together]:
            fixed, each = step_bytes(self.shape, self._length, texts_each)
            rows = (self._memory - fixed - self._tables) // each
            if rows >= 1:
                self._together = min(self._together, texts_each)
                return int(min(rows, CPU_ROWS if on_cpu() else ROWS))
        needs = self._tables + fixed + each
        said = f"training this drafter needs {format_size(needs, round_up=True)}; give that, or a smaller --share"
        raise BudgetError(f"--memory {self._args.memory or AUTO}: {said}", needs)


def _embeddings(module: nn.Module, tokens: int) -> mx.array:
    """Returns the embeddings of the first ``tokens`` ids, which a streamed model reads from disk."""
    parts = [module(mx.arange(at, min(at + ROWS_READ, tokens))) for at in range(0, tokens, ROWS_READ)]
    for part in parts:
        mx.eval(part)
    return mx.concatenate(parts)


def _dense(module: nn.Module) -> mx.array:
    if module.weight.ndim != 2:  # its place is empty
        raise BudgetError("the model's output head is not in memory; give more --memory, and leave out --resident")
    if "scales" in module:
        made: mx.array = mx.dequantize(
            module.weight, module.scales, module.get("biases"), module.group_size, module.bits, mode=module.mode
        )
        return made
    return mx.array(module.weight)


def _ends(folder: Path) -> list[int]:
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            ends += found if isinstance(found, list) else [found]
    return ends
