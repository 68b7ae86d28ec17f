"""``outcore draft train``: collects a model's hidden states on continuations of given text, and trains a drafter."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import math
import time
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
from outcore.machine.device import on_cpu
from outcore.options import AUTO
from outcore.plan.joint_plan import NONE
from outcore.sizes import format_size
from outcore.text import printable

from .config import config_of, is_drafter
from .published import trained_values
from .train import collect, drafter_files, texts
from .train.network import PIECE, Network, Shape
from .train.products import CODE_BITS, fast_quantized
from .train.training import DEPTH, TRIED, Progress, Trainer, is_held_out
from .train.work_folder import WORK, WorkFolder

# Tokens of a piece of text that the model continues.
PROMPT = 128

# Bits of a drafter's weight when it drafts, with scales and biases of groups of 64.
WEIGHT_BITS = CODE_BITS + 2 * 16 / 64

# A drafter's inner width for the model's width, if the user asks for no size: the least of those that were trained to
# anything like their end, as 1.1 and 1.9 times the bytes gave no more tokens a pass (dev/log/drafts.md).
WIDTH = 11 / 3

# A pass that verifies guesses takes so many times a plain one where the disk is the limit (dev/log/drafts.md).
LONGER = 1.07

# Evaluations of a training at most, after each of which weights are saved.
SAVES = 20

# A disk with less room than this is full.
LEAST_ROOM = 1 << 20

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
        "size in 4 bits": format_size(round(shape.parameters * WEIGHT_BITS / 8)),
        "tokens a pass, on held-out texts": progress.best,
        "texts": f"{job.shards.count * job.texts} of {PROMPT} + {args.max_tokens} tokens",
        "drawn from, also those held out": format_size(job.input_bytes),
        "steps": progress.steps,
        "written while training": format_size(job.written),
    }
    made = drafter_files.config_of(shape, job.model_type, job.layers, job.positions, DEPTH)
    made |= trained_values(progress.best, TRIED)
    named = [str(path) for path in args.input]
    drafter_files.save(out, job.net, made, drafter_files.card(name_of(folder), named, facts))
    counted, pays = f"{progress.best:.2f} tokens a pass on held-out texts", progress.best >= job.pays_from
    less = f"does not pay: {counted}, and it needs {job.pays_from:.2f}; train longer or on more text"
    print(f"{printable(str(out))}: {f'{counted}; use it with --draft {out}' if pays else less}")
    record = {"folder": str(out), "bytes": job.written, "history": progress.history, "pays_from": job.pays_from}
    args.result.record = record | facts


class Job:
    """One training: its model, its texts and its files.

    Args:
        work: the folder of what a resumed training needs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, work: WorkFolder, files: list[Path]) -> None:
        self._args, self._folder, self._work, self._files = args, folder, work, files
        self._seed = 0 if args.seed is None else args.seed
        self.input_bytes = sum(file.stat().st_size for file in files)  # once trained, the texts may be gone
        self.written = 0
        self._collected_s = 0.0  # spent on the files of states that are there

    def run(self, bar: ProgressBar) -> Progress:
        args = self._args
        self._tokenizer: Any = load_tokenizer(self._folder)
        self._tokenizer = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
        texts.pieces(
            self._tokenizer, self._files, 1, PROMPT, [self._seed], held_out=False
        )  # or there is too little text
        self._memory = given_budget(args.memory)
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
            seconds=args.minutes * 60, folder=self._work.path, seed=self._seed, report=report,
            every=args.minutes * 60 / self._saves,
            step_done=lambda p: bar.count("training", round(p.seconds), round(args.minutes * 60), f"loss {p.loss:.2f}"),
        )  # fmt: skip
        progress = trainer.run()
        self.written += trainer.written
        return progress

    def _load(self) -> Any:
        """Loads the model with room for as many texts in a pass as the memory allows."""
        options = loading_options(self._args) | {"draft": NONE, "context": PROMPT + self._args.max_tokens}
        options["govern"] = False  # tapped layers stay streamed, or resident
        options["memory"] = max(1, self._memory - (beside := _beside(self._folder)))
        for self._together in TOGETHER:
            try:
                model, _ = outcore.load_model(str(self._folder), **options, batch=self._together)
                return model
            except BudgetError as e:
                if self._together == TOGETHER[-1]:
                    if e.smallest is None:
                        raise
                    least = e.smallest + beside
                    needs = format_size(least, round_up=True)
                    why = f"--memory {self._args.memory or AUTO}: too small to collect the model's states; give {needs}"
                    raise BudgetError(why, least) from e
        raise AssertionError

    def _measure(self, model: Any) -> None:
        text = getattr(model, "language_model", model)
        if not all(hasattr(getattr(text, "model", None), each) for each in ("embed_tokens", "layers", "norm")):
            raise UnsupportedModelError(f"{self._folder}: published drafters cannot draft for models of this type")
        inner, config = text.model, json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        own = config.get("text_config") or config
        self.model_type, self.layers = config["model_type"], len(inner.layers)
        self.positions = own.get("max_position_embeddings", 4096)
        dtype = mx.float32 if on_cpu() else mx.bfloat16
        own_head = "lm_head" in text
        self._head = _dense(text.lm_head if own_head else inner.embed_tokens).astype(dtype)
        self._norm = mx.array(inner.norm.weight).astype(mx.float32)
        mx.eval(self._head, self._norm)
        self._table = _embeddings(inner.embed_tokens, len(self._head)).astype(dtype) if own_head else self._head
        mx.eval(self._table)
        vocabulary, hidden = self._table.shape
        head_dim = 64 if hidden < 1024 else 128
        heads = max(1, hidden // head_dim)
        kv_heads = next(n for n in range(max(1, heads // 4), heads + 1) if heads % n == 0)
        last = self.layers - 1
        if last < 2:
            raise UsageError(f"{self._folder}: a drafter reads three layers; this model has {self.layers}")
        tapped = (last // 5, last * 3 // 5, last)
        self.shape, share = Shape(hidden, heads, kv_heads, head_dim, 64, vocabulary, tapped), self._args.share
        self._model_bytes, width = open_checkpoint(self._folder).nbytes, max(64.0, WIDTH * hidden)
        if share is not None:
            width = (share * self._model_bytes * 8 / WEIGHT_BITS - self.shape.parameters) / (3 * hidden) + 64
        if width < 64:
            least = self.shape.parameters * WEIGHT_BITS / 8 / self._model_bytes
            raise UsageError(f"--share {share}: give at least {math.ceil(least * 1000) / 1000}")
        self.shape = dataclasses.replace(self.shape, intermediate=int(min(width, max(64, 8 * hidden))) // 64 * 64)
        self._ends = sorted({e for e in _ends(self._folder) if e is not None})

    def _check(self) -> None:
        """Chooses how many texts fit on the disk, and refuses other settings than a begun training's."""
        args, shape = self._args, self.shape
        row = (PROMPT + args.max_tokens) * (3 * shape.hidden * 2 + 4 + 6 * collect.LIKELY)
        disk, room = parse_size(args.disk, flag="--disk"), self._work.free_bytes + self._work.own_bytes
        if disk > room:
            raise UsageError(f"--disk {args.disk}: {format_size(room)} are free there")
        # Half of what may be written is for weights, or what two evaluations need; the rest is for states.
        limit, self._saves = disk_shares(disk, shape.parameters)
        known = self._work.settings
        if known and known["texts"] > self._together:
            raise BudgetError(f"--memory: this training was begun with room for {known['texts']} texts at once")
        # A file's texts are those of a pass, so that no more states than its own are in memory.
        self.texts = known["texts"] if known else max(1, min(self._together, limit // row // 2))
        count = known["count"] if known else limit // (row * self.texts)
        if count < 2:
            needs = max(disk - limit, 2 * row * self.texts) + 2 * row * self.texts
            raise UsageError(f"--disk {args.disk}: give at least {format_size(needs, round_up=True)}")
        self.shards = collect.Shards(self._work.states, int(count))
        self._used = {
            "model": str(self._folder), "share": args.share, "tokens": args.max_tokens, "temp": args.temp or 0.0,
            "seed": self._seed, "texts": self.texts, "disk": args.disk,
            "input": hashlib.sha256("\n".join(f"{f}:{f.stat().st_size}" for f in self._files).encode()).hexdigest(),
        }  # fmt: skip
        if known is not None:
            self._collected_s = known["seconds"]
            if known != self._used | {key: known[key] for key in ("count", "seconds")}:
                raise UsageError(f"{printable(str(self._work.path))}: begun with other settings; give another --output")
        self._begin()
        most = self.shards.count * self.texts
        tell(
            f"the drafter {self._price()}. First hidden states are collected, for at most {args.minutes:g} min, "
            f"{most} texts and {format_size(most * row)}; then the drafter is trained, for at most {args.minutes:g} min"
        )

    def _begin(self) -> None:
        self._work.begin(self._used | {"count": self.shards.count, "seconds": self._collected_s})

    @property
    def pays_from(self) -> float:
        """The tokens a pass from which the drafter's bytes are better spent so than on the model's weights, of which
        each pass then reads so many more."""
        missing = self._model_bytes - self._memory
        return LONGER * (1 + self.shape.parameters * WEIGHT_BITS / 8 / missing) if missing > 0 else LONGER

    def _price(self) -> str:
        takes = self.shape.parameters * WEIGHT_BITS / 8
        said = f"takes {format_size(round(takes))} in 4 bits, {100 * takes / self._memory:.1f} % of the memory"
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
            if passed > most_s and n >= 2:
                self.shards.count = n
                self._begin()
                break
            bar.count(f"hidden states, {n * self.texts} texts", min(round(passed), most_s), most_s)
            mx.random.seed(self._seed * 1_000_003 + n)
            prompts = texts.pieces(
                self._tokenizer, self._files, self.texts, PROMPT, [self._seed, n], held_out=is_held_out(n)
            )
            with fast_quantized(evaluated=resident):
                made = collect.continue_texts(model, layers, self.shape.tapped, prompts, args.max_tokens, draw)
            self.shards.save(n, made)
            self._collected_s = time.monotonic() - began
            self._begin()
            mx.clear_cache()
        self.written += self.shards.written_bytes

    def _rows(self) -> int:
        """Returns texts in a step. Raises ``BudgetError`` if not even one fits."""
        head = 0 if self._head is self._table else self._head.nbytes
        fixed, each = step_bytes(self.shape, PROMPT + self._args.max_tokens, self._together)
        fixed += self._table.nbytes + head
        rows = (self._memory - fixed) // each
        if rows < 1:
            needs = format_size(fixed + each, round_up=True)
            raise BudgetError(f"--memory: training this drafter needs {needs}; give that, or a smaller --share")
        return int(min(rows, CPU_ROWS if on_cpu() else ROWS))


def step_bytes(shape: Shape, length: int, texts: int) -> tuple[int, int]:
    """Returns the bytes that a training step takes beside the model's tables, and those for each of its texts.

    Args:
        length: tokens of a text.
        texts: how many a file of states has.
    """
    # Weights and the optimizer's two averages; weights as quantized, gradients, and their squares. Seen on a CPU: 5.4.
    fixed = 8 * 4 * shape.parameters + 3 * 4 * PIECE + texts * length * (3 * shape.hidden * 2 + 4 + 6 * collect.LIKELY)
    # For each place, floats of every guess that its gradient needs; on a CPU also what they were made of.
    guess = 24 * shape.hidden + 6 * shape.intermediate + 5 * shape.heads * length
    each = 4 * length * (DEPTH * guess + 12 * shape.hidden)
    return fixed, 4 * each if on_cpu() else each


def disk_shares(disk: int, parameters: int) -> tuple[int, int]:
    """Returns how many of the bytes that may be written are for states (negative: they are too few), and how often
    weights are saved."""
    # Each time the best weights, and the last with the optimizer's two averages; at the end the drafter in bfloat16.
    saved, drafter = parameters * 4 * 4, parameters * 2
    weights = max(disk // 2, 2 * saved + drafter)
    return disk - weights, min(SAVES, (weights - drafter) // saved)


def _beside(folder: Path) -> int:
    """Returns the bytes beside the model while states are collected: its embeddings and output head as training needs
    them, and a matrix of that size that is dequantized for a product."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = config.get("text_config") or config
    values = sizes.get("vocab_size", 0) * sizes.get("hidden_size", 0)
    tables = 1 + any(name.endswith("lm_head.weight") for name in open_checkpoint(folder).tensors)
    return int(values * (4 * tables + 6 if on_cpu() else 2 * tables + 4))


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
