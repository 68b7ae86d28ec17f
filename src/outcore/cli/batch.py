"""``outcore batch``: answer a file of requests in OpenAI's batch format; as many share a sweep as have room."""

from __future__ import annotations

import argparse
import json
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.lazy_model import config_of, position_limit
from ..checkpoint.tokenizer import load_tokenizer
from ..checks import whole
from ..decode.batch import Progress, answers
from ..decode.batch_engine import Request
from ..decode.batch_file import (
    NO_MEMORY,
    BatchRequest,
    Output,
    OutputElsewhere,
    answered,
    line_error,
    read_lines,
    refused,
)
from ..decode.loader import load_model
from ..decode.preparation import Preparation, prepare
from ..engine.session import Session
from ..engine.transport import Agreement, Solo
from ..errors import BudgetError, RequestError, UsageError
from ..plan.planner import smallest_budget
from ..plan.workload import Workload
from ..serve.batch_lines import line_request
from ..serve.prompting import Prompter
from ..sizes import format_size
from ..text import counted, printable
from .arguments import loading_options
from .engine import ProgressBar, engine_record, print_summary, progress_bar, watched
from .model_folder import model_folder
from .output import Result, tell


@dataclass(frozen=True)
class Task:
    """A line that can be answered, and what its answer begins with."""

    line: BatchRequest
    request: Request

    @property
    def need(self) -> int:
        """Tokens of prompt and answer at most."""
        return len(self.request.tokens) + self.request.max_tokens


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.resume and args.force:
        raise UsageError("--resume and --overwrite: give one of them")
    for flag in ("max_tokens", "decode_concurrency"):
        whole(f"--{flag.replace('_', '-')}", getattr(args, flag))
    with progress_bar() as bar:
        lines, agreement = list(read_lines(args.input)), _agreement(args)
        made: Output | OutputElsewhere = OutputElsewhere(args.output)
        if agreement.chooses:
            made = Output(args.output, args.input, args.model, resume=args.resume, overwrite=args.force)
        with made as output:
            output.require({line.id for line in lines})
            # What the first rank's file has, which may be the only one.
            output.done = json.loads(agreement.text(lambda: json.dumps(output.done)))
            resumed = len(output.done)
            folder = model_folder(args)
            tokenizer = load_tokenizer(
                folder, {"trust_remote_code": args.trust_remote_code}, eos=config_of(folder).get("eos_token_id")
            )
            longest = position_limit(config_of(folder))
            todo = [line for line in lines if line.id not in output.done]
            tasks, errors = read_tasks(todo, tokenizer, args.max_tokens, longest, bar)
            model: nn.Module | None = None
            if tasks:
                model, tasks, too_long = _load(folder, tasks, args, bar)
                errors += too_long
            output.begin()
            for line, error in errors:
                output.write(refused(line, line_error(error)))
            done, began = Progress(), time.perf_counter()
            if model is not None:
                try:
                    with watched(model, args):
                        _answer(model, tokenizer, tasks, output, args.model, done, bar)
                except KeyboardInterrupt:
                    bar.clear()
                    tell(f"{len(output.done)} of {len(lines)} lines are in {output.path}; --resume goes on from there")
                    raise
            bar.clear()
            _report(lines, output, done, time.perf_counter() - began, resumed, model, args.result)


def _agreement(args: argparse.Namespace) -> Agreement:
    """With the ranks that share the model, if there are any."""
    ranks = getattr(args, "ranks", None)
    return Solo() if ranks is None else ranks.agreement


def read_tasks(
    lines: Sequence[BatchRequest], tokenizer: TokenizerWrapper, max_tokens: int, longest: int | None, bar: ProgressBar
) -> tuple[list[Task], list[tuple[BatchRequest, Exception]]]:
    """The lines that can be answered, and why others cannot, whatever goes wrong with them.

    Args:
        max_tokens: of an answer, where a line does not say.
        longest: tokens that the model has positions for; None: for any number.
    """
    tasks: list[Task] = []
    errors: list[tuple[BatchRequest, Exception]] = []
    prompter = Prompter(tokenizer)
    for n, line in enumerate(lines):
        if n % 100 == 0:
            bar.count("reading", n, len(lines))
        try:
            if line.error is not None:
                raise line.error
            request = line_request(n, line, prompter, max_tokens)
            prompt, limit = array("i", request.tokens), request.max_tokens
            if longest is not None and len(prompt) > longest:
                raise RequestError(
                    f"the prompt has {len(prompt)} tokens; this model's context is {longest}: shorten it",
                    "context_length_exceeded",
                )
            # The last token is not computed.
            limit = limit if longest is None else min(limit, longest - len(prompt) + 1)
            tasks.append(Task(line, replace(request, tokens=prompt, max_tokens=limit)))
        except Exception as e:  # tokenizers and templates raise what they like
            errors.append((line, e))
    return tasks, errors


def _load(
    folder: Path, tasks: Sequence[Task], args: argparse.Namespace, bar: ProgressBar
) -> tuple[nn.Module | None, list[Task], list[tuple[BatchRequest, Exception]]]:
    """The model with room for as many tasks as answer all of them soonest, and the tasks that there is room for.

    Raises:
        BudgetError: there is room for none of them; says the smallest budget for the one that needs least.
    """
    options = loading_options(args)

    def loaded(kept: Sequence[Task]) -> nn.Module:
        workload = _workload(kept, args.decode_concurrency)
        sizes: dict[str, Any] = {"context": workload.context, "prompt": workload.prompt, "sequences": workload}
        return load_model(folder, **options, **sizes, draft="none", progress=bar)[0]

    agreement = _agreement(args)
    if agreement.alone:
        with suppress(BudgetError):
            return loaded(tasks), list(tasks), []
    alone = prepare(folder, **options, context=2, prompt=1, least=True)
    fitting, errors = _fitting(alone, tasks, args) if agreement.alone else _fitting_all(agreement, alone, tasks, args)
    return loaded(fitting), fitting, errors


def _fitting_all(
    agreement: Agreement, alone: Preparation, tasks: Sequence[Task], args: argparse.Namespace
) -> tuple[list[Task], list[tuple[BatchRequest, Exception]]]:
    """As ``_fitting``, of ranks that share the model: the tasks that all of them have room for.

    Raises:
        BudgetError: there is room for none of them, here or elsewhere.
    """
    nothing: BudgetError | None = None
    try:
        mine, errors = _fitting(alone, tasks, args)
    except BudgetError as e:
        mine, errors, nothing = [], [], e
    numbers = {task.request.uid for task in mine}
    everywhere = agreement.leasts([task.request.uid in numbers for task in tasks])
    kept = [task for task, fits in zip(tasks, everywhere, strict=True) if fits]
    numbers.difference_update(task.request.uid for task in kept)
    if not kept:
        raise nothing or BudgetError(f"another machine has room for none of {len(tasks)} requests")
    elsewhere = "another machine has no room for {} prompt tokens and up to {} new ones"
    for task in mine:
        if task.request.uid in numbers:
            told = elsewhere.format(len(task.request.tokens), task.request.max_tokens)
            errors.append((task.line, RequestError(told, NO_MEMORY)))
    return kept, errors


def _fitting(
    alone: Preparation, tasks: Sequence[Task], args: argparse.Namespace
) -> tuple[list[Task], list[tuple[BatchRequest, Exception]]]:
    """The tasks that there is room for one after the other, those that need least first; and why not for others.

    Args:
        alone: the model with next to nothing to answer.

    Raises:
        BudgetError: there is room for none of them.
    """
    budget = alone.plan.budget_bytes

    @cache
    def smallest(context: int, prompt: int) -> int:
        return smallest_budget(
            # Sequences that may share passes have their keys and values in memory.
            replace(alone.profile.size.at_context(context), prompt=prompt, kv_disk="off"),
            slots=args.slots,
            resident=args.resident,
            prefill_step=args.prefill_step_size,
            experts=args.experts,
        )

    def needed(kept: Sequence[Task]) -> int:
        """The smallest budget for requests one after the other."""
        workload = _workload(kept, 1)
        return smallest(workload.context, workload.prompt)

    ordered = sorted(tasks, key=lambda task: needed([task]))
    if alone.refused is not None or needed(ordered[:1]) > budget:
        least, first = needed(ordered[:1]), ordered[0].request
        raise BudgetError(
            f"there is room for none of {len(tasks)} requests; for the one that needs least, {len(first.tokens)} "
            f"prompt tokens and up to {first.max_tokens} new ones, the smallest that works is "
            + format_size(least, round_up=True),
            least,
        )
    fits = bisect_left(range(1, len(ordered) + 1), True, key=lambda count: needed(ordered[:count]) > budget)
    errors: list[tuple[BatchRequest, Exception]] = []
    for task in ordered[fits:]:
        enough = format_size(needed([*ordered[:fits], task]), round_up=True)
        told = (
            f"{len(task.request.tokens)} prompt tokens and up to {task.request.max_tokens} new ones do not fit into "
            f"{format_size(budget)} with this model: give {enough} and --resume, or ask for fewer"
        )
        errors.append((task.line, RequestError(told, NO_MEMORY)))
    return ordered[:fits], errors


def _workload(tasks: Sequence[Task], most: int) -> Workload:
    return Workload(tuple((len(t.request.tokens), t.request.max_tokens) for t in tasks), most)


def _answer(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    tasks: Sequence[Task],
    output: Output | OutputElsewhere,
    name: str,
    done: Progress,
    bar: ProgressBar,
) -> None:
    """Answer all tasks, and write each answer down as it comes."""
    lines = {t.request.uid: t.line for t in tasks}
    began, written = time.perf_counter(), 0
    bar.clear()

    def show() -> None:
        speed = done.generation_tokens / max(time.perf_counter() - began, 1e-9)
        bar.count("answering", written, len(tasks), f"{done.running} at a time, {speed:.1f} tok/s")

    def failed(request: Request, error: Exception) -> None:
        output.write(refused(lines[request.uid], line_error(error)))

    requests = [t.request for t in tasks]
    for answer in answers(model, tokenizer, requests, progress=done, on_step=show, failed=failed):
        output.write(answered(lines[answer.request.uid], answer, name))
        written += 1


def _report(
    lines: Sequence[BatchRequest],
    output: Output | OutputElsewhere,
    done: Progress,
    seconds: float,
    resumed: int,
    model: nn.Module | None,
    result: Result,
) -> None:
    """Say what was done: a line on standard output, the engine's part on standard error."""
    completed = sum(output.done.values())
    failed = len(output.done) - completed
    speed = done.generation_tokens / seconds if done.generation_tokens else 0.0
    print(f"{printable(str(output.path))}: {counted(completed, 'answer')}, {counted(failed, 'error')}")
    record: dict[str, Any] = {
        "requests": len(lines),
        "completed": completed,
        "failed": failed,
        "resumed": resumed,
        "prompt_tokens": done.prompt_tokens,
        "generation_tokens": done.generation_tokens,
        "generation_tps": round(speed, 4),
        "seconds": round(seconds, 4),
        "sequences": 0,
        "sweeps": 0,
        "tokens_per_sweep": round(done.generation_tokens / done.sweeps, 4) if done.sweeps else 0.0,
        "bytes_read": 0,
        "peak_memory_bytes": 0,
        "budget_bytes": 0,
    }
    if model is not None:
        session: Session = model.outcore
        # What keeps a model that is all in memory busy are steps; its sweeps would be 0.
        record |= engine_record(session) | {"sequences": session.size.sequences, "sweeps": done.sweeps}
        said = f"{counted(done.generation_tokens, 'token')} in {seconds:.1f} s, {speed:.2f} tokens per second"
        shared = (
            f"{record['tokens_per_sweep']:.1f} tokens a sweep, {counted(session.size.sequences, 'sequence')} at most"
        )
        print_summary([f"Generation: {said}; {shared}"], session)
    result.record = record
