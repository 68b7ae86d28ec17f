"""``outcore batch``: answers a file of requests in OpenAI's batch format; as many as have room share a forward pass."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from outcore.checkpoint.positions import config_of, position_limit
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.checks import COUNT, whole
from outcore.cli.engine import ProgressBar, engine_record, model_folder, print_summary, watched
from outcore.cli.flags import loading_options
from outcore.cli.output import tell
from outcore.decode.batch import Progress, answers
from outcore.decode.loader import load_model
from outcore.decode.media import media_reader
from outcore.decode.opening import options_for
from outcore.decode.preparation import Preparation, prepare
from outcore.decode.request import Request
from outcore.decode.request_text import checked_text
from outcore.engine.transport import Agreement
from outcore.errors import BudgetError, RequestError, UsageError
from outcore.options import LoadOptions
from outcore.packages import modules
from outcore.plan.planner import reading_sizes, smallest_budget
from outcore.plan.workload import Workload
from outcore.serve import completions, openai
from outcore.serve.api import HttpRequest, ParsedRequest
from outcore.serve.choice import request_of
from outcore.serve.events import GenerationRequest
from outcore.serve.prompting import Prompter
from outcore.serve.requests import OPAQUE, UNSUPPORTED, wrong
from outcore.sizes import format_size
from outcore.text import counted, printable

from . import files
from .files import CHAT, NO_MEMORY, BatchRequest, Output, OutputElsewhere

# (uid, error) of requests that cannot be answered.
Refused = list[tuple[int, Exception]]


def run(args: argparse.Namespace) -> int:
    if args.resume and args.force:
        raise UsageError("--resume and --overwrite: give one of them")
    whole("--max-tokens", args.max_tokens)
    whole("--decode-concurrency", args.decode_concurrency)
    lines = list(files.read_lines(args.input))
    # If ranks share the model, only rank 0 writes the output file.
    agreement: Agreement = Agreement() if args.ranks is None else args.ranks.agreement
    made: Output | OutputElsewhere = OutputElsewhere(args.output)
    if agreement.chooses:
        made = Output(args.output, args.input, args.model, resume=args.resume, overwrite=args.force)
    with made as output, ProgressBar() as bar:
        output.require({line.id for line in lines})
        output.done = json.loads(agreement.text(lambda: json.dumps(output.done)))
        resumed, todo = len(output.done), [line for line in lines if line.id not in output.done]
        folder = model_folder(args)
        config = config_of(folder)
        settings = {"trust_remote_code": args.trust_remote_code}
        tokenizer = load_tokenizer(folder, settings, eos=config.get("eos_token_id"))
        images = LineImages(folder, args)
        requests, errors = read_requests(todo, tokenizer, args.max_tokens, position_limit(config), bar, images)
        model: nn.Module | None = None
        if requests:
            model, requests, too_long = _load(folder, requests, args, agreement, bar)
            errors += too_long
        output.begin()
        for uid, error in errors:
            output.write(files.refused(todo[uid], files.line_error(error)))
        done, began = Progress(), time.perf_counter()
        if model is not None:
            try:
                with watched(model, args):
                    _answer(model, tokenizer, requests, todo, output, args.model, done, bar)
            except KeyboardInterrupt:
                bar.clear()
                tell(f"{len(output.done)} of {len(lines)} lines are in {output.path}; --resume continues from there")
                raise
        bar.clear()
        counts = {"requests": len(lines), "resumed": resumed}
        args.result.record = counts | _report(output, done, time.perf_counter() - began, model)
    # The launcher of several machines would take the status for a rank that failed.
    return 1 if agreement.alone and args.result.record["failed"] else 0


def read_requests(
    lines: Sequence[BatchRequest],
    tokenizer: TokenizerWrapper,
    max_tokens: int,
    longest: int | None,
    bar: ProgressBar,
    images: LineImages | None = None,
) -> tuple[list[Request], Refused]:
    """Returns the requests of lines that can be answered, with the lines' places as uids, and the others' errors.

    Args:
        max_tokens: most tokens of an answer if its line does not give a number.
        longest: number of tokens that the model has positions for; None: any number.
        images: reads those of lines; None: there are none.
    """
    requests: list[Request] = []
    errors: Refused = []
    prompter = Prompter(tokenizer, reader=images.reader) if images else Prompter(tokenizer)
    for n, line in enumerate(lines):
        if n % 100 == 0:
            bar.count("reading", n, len(lines))
        try:
            if line.error is not None:
                raise line.error
            request = line_request(n, line, prompter, max_tokens, images)
            prompt, limit = array("i", request.tokens), request.max_tokens
            if longest is not None:
                if len(prompt) > longest:
                    raise RequestError(
                        f"the prompt has {len(prompt)} tokens; this model's context is {longest}: shorten it",
                        "context_length_exceeded",
                    )
                limit = min(limit, longest - len(prompt) + 1)  # the model never gets the last token
            requests.append(replace(request, tokens=prompt, max_tokens=limit))
        except Exception as e:  # tokenizers and templates may raise anything
            errors.append((n, e))
    return requests, errors


def line_request(
    uid: int, line: BatchRequest, prompter: Prompter, max_tokens: int, images: LineImages | None = None
) -> Request:
    """Returns the engine's request for a line.

    Args:
        max_tokens: most tokens of the answer if the line's body does not give a number.

    Raises:
        RequestError: the body is malformed, or requests something that a batch does not support.
    """
    parsed = _parsed(line)
    (request, *more), writer = parsed.requests, parsed.writer
    given = {
        "stream": writer.streams,
        "n": request.choices > 1,
        "prompt": more,
        "tools": request.tools,
        "logprobs": request.logprobs is not None,
        "response_format": request.form is not None,
    }
    for name in (name for name, value in given.items() if value):
        raise wrong(name, "not supported; leave it out", UNSUPPORTED)
    for name in writer.ignored:
        raise wrong(name, "no such parameter", "unknown_parameter")
    if request.max_tokens == COUNT:
        raise wrong("max_tokens", "give a number of tokens; answers of a batch need a limit")
    if isinstance(request.prompt, str):
        checked_text(request.prompt, "prompt")
    if images is not None:
        images.ready(request)
    prompt = prompter.prepare(request)
    if prompt.media is not None and images is not None:
        # Not all lines' pixels at once: a line's are decoded again when it is answered.
        cast(Any, prompt.media).leave_out(lambda: images.of(line, prompter))
    return request_of(uid, prompt, replace(request, max_tokens=request.max_tokens or max_tokens))


def _parsed(line: BatchRequest) -> ParsedRequest:
    if not isinstance(line.body, dict):
        raise RequestError("body: not a JSON object")
    read = openai.chat if line.url == CHAT else completions.completion
    return read(HttpRequest(cast(Any, None), line.body))


class LineImages:
    """Reads the images of lines, if the model in a folder takes any and a package reads them."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        config = config_of(folder)
        self._packages = list(modules("parts").values()) if args.ranks is None else []
        self._taken = {k: n for package in self._packages for k, n in package.takes(folder, config).items()}
        options = replace(LoadOptions(), images=True)
        config |= options_for(folder, options).model_config or {}
        self._last: tuple[str, Any] = "", None
        self.reader = cache(lambda: media_reader(folder, config, args.ranks))
        if self._taken:
            for package in self._packages:
                OPAQUE.update(package.READERS)

    def ready(self, request: GenerationRequest) -> None:
        for package in self._packages:
            asyncio.run(package.ready(request.messages or (), self._taken, remote=False))

    def of(self, line: BatchRequest, prompter: Prompter) -> Any:
        """Returns the media of a line, which stay in memory until another's are asked for."""
        if self._last[0] != line.id:
            self._last = "", None
            request = _parsed(line).requests[0]
            self.ready(request)
            self._last = line.id, prompter.prepare(request).media
        return self._last[1]


def _load(
    folder: Path, requests: list[Request], args: argparse.Namespace, agreement: Agreement, bar: ProgressBar
) -> tuple[nn.Module, list[Request], Refused]:
    """Returns the model, which computes as many requests at a time as is fastest, and the requests that fit.

    Raises:
        BudgetError: none fits; names the smallest budget for the request that needs least.
    """
    options = loading_options(args) | {"images": any(request.media is not None for request in requests)}

    def loaded(kept: Sequence[Request]) -> nn.Module:
        work = _workload(kept, args.decode_concurrency)
        sizes: dict[str, Any] = {"context": work.context, "prompt": work.prompt, "sequences": work}
        return load_model(folder, **options, **sizes, draft="none", progress=bar)[0]

    if agreement.alone:
        with suppress(BudgetError):
            return loaded(requests), requests, []
    alone = prepare(folder, **options, context=2, prompt=1, least=True)
    kept, errors = _fitting(alone, requests, args, agreement)
    return loaded(kept), kept, errors


def _fitting(
    alone: Preparation, requests: Sequence[Request], args: argparse.Namespace, agreement: Agreement
) -> tuple[list[Request], Refused]:
    """Returns the requests that all machines have room for one at a time, and the errors of the others.

    Args:
        alone: the model, prepared with the smallest context.

    Raises:
        BudgetError: there is room for none of them.
    """
    budget = alone.plan.budget_bytes

    @cache
    def smallest(context: int, prompt: int) -> int:
        return smallest_budget(
            # Sequences that may share passes keep their keys and values in memory.
            reading_sizes(replace(alone.profile.size.at_context(context), prompt=prompt, kv_disk="off"))[-1],
            slots=args.slots,
            resident=args.resident,
            prefill_step=args.prefill_step_size,
            experts=args.experts,
        )

    def needed(kept: Sequence[Request]) -> int:
        work = _workload(kept, 1)
        return smallest(work.context, work.prompt)

    # Sorted by needed memory, so that the requests that fit come first.
    ordered = sorted(requests, key=lambda request: needed([request]))
    counts = range(1, len(ordered) + 1) if alone.refused is None else ()
    fits = bisect_left(counts, True, key=lambda count: needed(ordered[:count]) > budget)
    here = {request.uid for request in ordered[:fits]}
    everywhere = agreement.leasts([request.uid in here for request in requests])
    kept = [request for request, fit in zip(requests, everywhere, strict=True) if fit]
    if not kept and here:
        raise BudgetError(f"another machine has too little memory for any of the {len(requests)} requests")
    if not kept:
        least = needed(ordered[:1])
        raise BudgetError(
            f"none of the {len(requests)} requests fits into {format_size(budget)} with this model; for the one that "
            f"needs least, {_size(ordered[0])}, the smallest that works is {format_size(least, round_up=True)}",
            least,
        )
    answerable = {request.uid for request in kept}
    errors: Refused = []
    for request in ordered:
        if request.uid in answerable:
            continue
        why = f"another machine has too little memory for {_size(request)}"
        if request.uid not in here:
            enough = format_size(needed([*ordered[:fits], request]), round_up=True)
            why = (
                f"{_size(request)} do not fit into {format_size(budget)} with this model: give {enough} and --resume, "
                "or ask for fewer"
            )
        errors.append((request.uid, RequestError(why, NO_MEMORY)))
    return kept, errors


def _size(request: Request) -> str:
    return f"{len(request.tokens)} prompt tokens and up to {request.max_tokens} new ones"


def _workload(requests: Sequence[Request], most: int) -> Workload:
    return Workload(tuple((len(r.tokens), r.max_tokens) for r in requests), most)


def _answer(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    requests: Sequence[Request],
    lines: Sequence[BatchRequest],
    output: Output | OutputElsewhere,
    name: str,
    done: Progress,
    bar: ProgressBar,
) -> None:
    began, written = time.perf_counter(), 0
    bar.clear()

    def show() -> None:
        speed = done.generation_tokens / max(time.perf_counter() - began, 1e-9)
        bar.count("answering", written, len(requests), f"{done.running} at a time, {speed:.1f} tok/s")

    def failed(request: Request, error: Exception) -> None:
        output.write(files.refused(lines[request.uid], files.line_error(error)))

    for answer in answers(model, tokenizer, requests, progress=done, on_step=show, failed=failed):
        output.write(files.answered(lines[answer.request.uid], answer, name))
        written += 1


def _report(
    output: Output | OutputElsewhere, done: Progress, seconds: float, model: nn.Module | None
) -> dict[str, Any]:
    """Prints the result, the engine's part on standard error. Returns it for ``--json``."""
    completed = sum(output.done.values())
    failed = len(output.done) - completed
    speed = done.generation_tokens / seconds if done.generation_tokens else 0.0
    each = round(done.generation_tokens / done.sweeps, 4) if done.sweeps else 0.0
    print(f"{printable(str(output.path))}: {counted(completed, 'answer')}, {counted(failed, 'error')}")
    record: dict[str, Any] = {"completed": completed, "failed": failed}
    record |= {"prompt_tokens": done.prompt_tokens, "generation_tokens": done.generation_tokens}
    record |= {"generation_tps": round(speed, 4), "seconds": round(seconds, 4), "tokens_per_sweep": each}
    if model is None:
        return record | dict.fromkeys(("sequences", "sweeps", "bytes_read", "peak_memory_bytes", "budget_bytes"), 0)
    sequences = model.outcore.size.sequences
    total = f"{counted(done.generation_tokens, 'token')} in {seconds:.1f} s, {speed:.2f} tokens per second"
    shared = f"{each:.1f} tokens a pass, {counted(sequences, 'sequence')} at most"
    print_summary([f"Generation: {total}; {shared}"], model.outcore)
    # Counts the decoder's steps, because a model that is all in memory has no passes of the engine.
    return record | engine_record(model.outcore) | {"sequences": sequences, "sweeps": done.sweeps}
