"""Shared by the commands that run a model: the model's folder, the progress bar, and the report of the engine."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from mlx_lm.generate import GenerationResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..checkpoint.find_model import resolve_model
from ..checkpoint.positions import config_of
from ..checkpoint.tokenizer import load_tokenizer
from ..decode.sampling import check_sampling, make_sampler
from ..decode.speculative.drafting import check_draft_length
from ..engine.session import Session
from ..errors import UsageError
from ..machine.allocator import peak_held
from ..machine.memory import peak_rss
from ..monitoring import publish
from ..packages import modules
from ..serve.parsing import Stopper
from ..sizes import format_size
from ..text import counted, one_line
from .console import BrokenLines, PlainConsole
from .flags import cache_options, model_name, sampling_options, text_of
from .output import say, tell

# Ends the loader's description of work that it does on first use only.
ONCE = ", once"


def model_folder(args: argparse.Namespace) -> Path:
    """Finds the model's folder as ``resolve_model`` does; several ranks wait for one another."""
    find: Callable[..., Path] = resolve_model if args.ranks is None else args.ranks.model_folder
    return find(args.model, args.revision)


def open_images(args: argparse.Namespace, folder: Path, names: Sequence[str]) -> Any:
    """Returns images that a command was given, opened by a package (``CommandImages`` of its group ``parts``)."""
    for package in modules("parts").values():
        return package.CommandImages(args, folder, names)
    raise UsageError("images need a package that is missing: pip install 'outcore[vision]'")


class ProgressBar(Progress):
    """A progress bar on standard error. Shows nothing if that is not a terminal, and disappears when it is done."""

    def __init__(self) -> None:
        what, amount = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[amount]}"))
        console = PlainConsole(stderr=True)
        columns = (SpinnerColumn(), what, BarColumn(), amount, TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._announced = False

    def __enter__(self) -> Self:
        return self  # the first task starts it

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self.console.is_terminal and ONCE in what:
            tell(f"{what} ({format_size(total)})")
        self._show(what, done, total, f"{format_size(done)} of {format_size(total)}")

    def count(self, what: str, done: int, total: int, more: str = "") -> None:
        self._show(what, done, total, f"{done} of {total}{', ' if more else ''}{more}")

    def measuring(self, what: str, done: int, total: int, more: str = "") -> None:
        """Shows calibration's progress; without a terminal, one line says why nothing happens for a while."""
        if not (self._announced or self.console.is_terminal):
            tell("measuring this machine, for up to a minute; the result is saved")
        self._announced = True
        self.count(what, done, total, more)

    def _show(self, what: str, done: int, total: int, amount: str) -> None:
        if not self.tasks or what != self.tasks[0].description:
            self.clear()
            self.start()
            self.add_task(what, total=total, amount=amount)
        self.update(self.task_ids[0], completed=done, total=total, amount=amount)

    def clear(self) -> None:
        if self.tasks:
            self.remove_task(self.task_ids[0])
            self.stop()


def prefill_progress(
    bar: ProgressBar, session: Session, check: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Shows in ``bar`` how far prefill has come. Returns the function to call at the first token, or on giving up.

    Args:
        check: called after each streamed unit until then; an exception that it raises stops prefill.
    """
    streaming = session.streaming
    if streaming is None:
        return bar.clear
    units = len(streaming.layers.units)
    # Shown at once: in the first run, compiling kernels delays the first unit.
    bar.count("weights for the prompt", 0, units)
    done = 0

    def unit() -> None:
        nonlocal done
        check()
        done += 1
        bar.count("weights for the prompt", (done - 1) % units + 1, units)

    streaming.after_unit.append(unit)

    def finish() -> None:
        if unit in streaming.after_unit:
            streaming.after_unit.remove(unit)
        bar.clear()

    return finish


def watched(model: Any, args: argparse.Namespace) -> Session:
    publish(model, args.command, model_name(args.model))
    session: Session = model.outcore
    forecast = session.transport.forecast
    if forecast is not None and session.transport.chooses:
        tell(forecast.line)
    return session


def engine_record(session: Session) -> dict[str, Any]:
    m, plan, forecast, mirrors = session.metrics, session.plan, session.transport.forecast, session.reading.mirrors
    folders = () if mirrors is None else mirrors.all
    return {
        "sweeps": m.sweeps,
        "bytes_read": m.bytes_read,
        "read_gbps": round(m.read_gbps, 3),
        "drafted_tokens": m.drafted,
        "accepted_tokens": m.accepted,
        "draft": session.drafting.name if session.drafting is not None else None,
        "stall_s": round(m.stall_s, 4),
        "resident_units": len(plan.resident),
        "streamed_units": len(plan.streamed),
        "head_streamed": plan.head_streamed,
        "slots": plan.slots,
        "expert_slots": sum(n for _, n in plan.pools),
        "experts_used": m.experts.used,
        "experts_read": m.experts.read,
        "experts_foreseen": m.experts.foreseen,
        "experts_wasted": m.experts.wasted,
        "peak_memory_bytes": peak_held(),
        "planned_peak_bytes": plan.peak_bytes,
        "peak_rss_bytes": peak_rss(),
        "budget_bytes": plan.budget_bytes,
        "io": session.io,
        "mirrors": [{"folder": str(r.folder), "bytes_read": r.nbytes, "lost": r.lost} for r in folders],
        "cpu_streams": session.cpu_streams,
        "notes": list(session.notes),
    } | ({} if forecast is None else {"shared": forecast.record() | {"waited_s": round(m.ranks_s, 4)}})


def print_summary(lines: list[str], session: Session) -> None:
    plan, m, forecast = session.plan, session.metrics, session.transport.forecast
    read = f"{counted(m.sweeps, 'pass')}; SSD {m.read_gbps:.2f} GB/s ({session.io}), {m.stall_s:.2f} s waiting for it"
    streaming = f"Streaming: nothing, {plan.held} are resident"
    if plan.pools:
        # A prefetched expert that was used was read from disk as well: no hit.
        hits = m.experts.used - m.experts.read - (m.experts.foreseen - m.experts.wasted)
        rate = f", hit rate {100 * max(0, hits) / m.experts.used:.0f} %" if m.experts.used else ""
        streaming = f"Experts: {plan.held} in memory{rate}; {format_size(m.bytes_read)} read, {read}"
    elif plan.streams:
        of, head = len(plan.resident) + len(plan.streamed), " and the head" if plan.head_streamed else ""
        each = format_size(plan.bytes_per_token)
        streaming = f"Streaming: {len(plan.streamed)} of {of} layers{head}, {each} a pass, {read}"
    lines = [*lines, streaming]
    if forecast is not None:
        lines.append(f"{len(forecast.record()['ranks'])} machines: {m.ranks_s:.2f} s waiting for the others")
    if session.drafting is not None and m.drafted:
        lines.append(f"Drafting: {session.drafting.name}, {m.accepted} of {m.drafted} drafted tokens accepted")
    peak, budget = peak_held(), plan.budget_bytes
    lines.append(
        f"Memory: peak {format_size(peak)} of {format_size(budget)} budget ({100 * peak / budget:.0f} %); whole "
        f"process {format_size(peak_rss())}"
    )
    console = PlainConsole(stderr=True, highlight=False, soft_wrap=True)
    for line in [*lines, *(f"Note: {note}" for note in session.notes)]:
        console.print(line)


def open_tokenizer(
    args: argparse.Namespace, settings: Mapping[str, Any], **preset: bool
) -> tuple[Path, TokenizerWrapper]:
    folder = model_folder(args)
    config = config_of(folder)
    settings = {**settings, "trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(folder, settings, eos=config.get("eos_token_id"), extra_eos=args.extra_eos_token)
    text = config.get("text_config")
    given = (part.get("vocab_size") for part in (config, text if isinstance(text, dict) else {}))
    sizes = [n for n in given if isinstance(n, int) and n > 0] or [len(tokenizer.get_vocab())]
    check_sampling(**sampling_options(args), vocabulary=sizes[0])
    args.preset.prepare(tokenizer, **preset)
    return folder, tokenizer


def draft_tokens(args: argparse.Namespace) -> dict[str, int]:
    """``--num-draft-tokens`` as an argument of ``stream_generate``."""
    most = args.num_draft_tokens
    return {} if most is None else {"num_draft_tokens": check_draft_length(most, "--num-draft-tokens")}


def generation_options(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> dict[str, Any]:
    sampler = make_sampler(
        **sampling_options(args),
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
        coupled=args.seed is not None,
    )
    basic = {"sampler": sampler, "max_tokens": args.max_tokens}
    return basic | args.preset.options() | cache_options(args) | draft_tokens(args)


def note_unquantized(args: argparse.Namespace, session: Session, tokens: int) -> None:
    """Notes when a text was too short for ``--kv-bits``: by default quantizing begins at token 5000, as in mlx-lm."""
    # The last token is not in the caches.
    if args.kv_bits is not None and tokens - 1 < args.quantized_kv_start:
        start = f"begins at token {args.quantized_kv_start} (--quantized-kv-start)"
        session.note(f"--kv-bits {args.kv_bits} {start}: none of the {tokens} tokens was quantized")


def rendered(tokenizer: TokenizerWrapper, messages: list[dict[str, str]], hint: str = "", **options: Any) -> str:
    """Applies the chat template as mlx-lm does; ``hint`` ends the error message where that fails."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as e:  # a template is code that comes with the model and may raise anything
        raise UsageError(f"the model's chat template refuses this: {one_line(e)}{hint}") from e
    return text_of("the chat template's text", str(text))


class AnswerOutput:
    """Prints and records one answer while it is generated.

    Attributes:
        ttft: seconds to the first token.
        finish: the finish reason.
        cut: whether a stop string ended the answer; ``tokens`` contain it, ``text`` does not.
    """

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.last: GenerationResponse | None = None
        self.ttft = 0.0
        self.finish, self.cut = "memory", False
        self._began, self._lines = time.perf_counter(), BrokenLines()

    def shown(
        self, responses: Iterator[GenerationResponse], stops: Sequence[str], begun: Callable[[], None]
    ) -> Generator[GenerationResponse, None, None]:
        """Yields the responses up to the first stop string, and writes their text to standard output.

        Text that may be the beginning of a stop string is held back until that is decided. ``begun`` is called with
        the first response.
        """
        stopper = Stopper(stops)
        # Closed at once: only then do the caches hold the whole answer.
        with closing(responses):  # type: ignore[type-var]
            for response in responses:
                text, reason = stopper.feed(response.text), response.finish_reason
                self.cut = stopper.found is not None
                if self.cut:
                    reason = "stop"
                elif reason is not None:
                    text += stopper.finish()
                if self.last is None:
                    begun()
                    self.ttft = time.perf_counter() - self._began
                self.last = replace(response, text=text, finish_reason=reason)
                self.text += text
                self.tokens.append(response.token)
                self.finish = reason or self.finish
                say(text, self._lines.broken)
                yield self.last
                if self.cut:
                    return

    def record(self) -> dict[str, Any]:
        last = self.last
        assert last is not None
        return {
            "text": self.text,
            "prompt_tokens": last.prompt_tokens,
            "generation_tokens": last.generation_tokens,
            "prompt_tps": round(last.prompt_tps, 4),
            "generation_tps": round(last.generation_tps, 4),
            "ttft_s": round(self.ttft, 4),
            "finish_reason": self.finish,
            "tokens": self.tokens,
        }


# How often Ctrl-C was pressed in the block of ``interruptible`` that is open; None: none is.
_pressed: list[int] | None = None


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed inside the block, or in the block around it.

    Only a second Ctrl-C raises KeyboardInterrupt. A process that ignores Ctrl-C, as in the background, still does.
    """
    global _pressed
    if (around := _pressed) is not None:
        yield lambda: bool(around)
        return
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    _pressed = received
    try:
        yield lambda: bool(received)
    finally:
        _pressed = None
        signal.signal(signal.SIGINT, before)
