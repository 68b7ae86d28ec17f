"""The ways in which Outcore is used, each with the same few methods: public names, but for two ranks in one test."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

import outcore
from combined_cases import Case
from combined_faults import Disturbed, Fault
from combined_models import VOCABULARY, Shelf, tokens_of
from combined_reference import PENALTY, SEED, TEMPERATURE, TOP_K, How, Text
from outcore.cli.main import main
from outcore.decode.sampling import make_sampler
from outcore.serve.server import Deadline
from outcore_compat.mlx_lm import apply_patch

LARGE = "2GB"
PREFIX = ("prefix_cold", "prefix_warm", "prefix_restart")
BLOCK = 8
"""Tokens of a block of the prefix cache, here: what 512 take is the same, and longer."""


@dataclass(frozen=True)
class Place:
    """Where a case's model lies, and how it is loaded."""

    case: Case
    shelf: Shelf

    @property
    def folder(self) -> Path:
        return self.shelf.model(self.case.kind, self.case.weights)

    @property
    def adapter(self) -> Path | None:
        return self.shelf.adapter(self.case.kind, self.case.weights, self.case.adapter)

    @property
    def cast(self) -> str | None:
        """MLX gathers experts in float32 alone on the CPU."""
        return "float32" if on_cpu() and (self.case.kind, self.case.weights) == ("moe", "bfloat16") else None

    def texts(self) -> list[Text]:
        """What is asked."""
        case = self.case
        length = (
            BLOCK + 10
            if case.context in PREFIX
            else 264
            if case.context == "kv_disk"
            else 24
            if case.context == "rotating"
            else 14
        )
        tokens = 5 if exact(case) else 6
        # Asked before what counts, the text is its own neighbour.
        again = case.context in PREFIX or case.disturbance != "none"
        alone = case.face in ("generate", "patch") and again and exact(case)
        alone |= case.context == "kv_disk"
        count = {"batch": 3, "ranks": 1}.get(case.face, 1 if alone else 2)
        if case.face == "session":
            more = [Text(prompt_of(9, salt), tokens, True) for salt in ((1,) if case.disturbance == "none" else (1, 2))]
            return [Text(prompt_of(length, 0), tokens, True), *more]
        # A client who is alone at last is drafted for.
        longer = 6 if case.face == "server" else 0
        return [Text(prompt_of(length - 3 * n, n), tokens + longer * n) for n in range(count)]

    @property
    def how(self) -> How:
        case = self.case
        settings: dict[str, Any] = {}
        if case.context == "kv_bits":
            settings = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 8}
        elif case.context == "rotating":
            settings = {"max_kv_size": 20}
        step = 64 if case.context == "kv_disk" else 8
        return How(settings, step, case.sampling)

    def options(self, **more: Any) -> dict[str, Any]:
        """Arguments of ``outcore.load``; ``more``: those of a rank, whose smallest budget is its own."""
        return self._options(**more) if more else dict(planned(self))

    def _options(self, **more: Any) -> dict[str, Any]:
        case, texts = self.case, self.texts()
        prompt = max(len(t.prompt) for t in texts)
        options: dict[str, Any] = {
            "context": sum(len(t.prompt) + t.tokens for t in texts if t.in_cache) or prompt + texts[-1].tokens,
            "prompt": prompt,
            "draft": self.draft(),
            "govern": case.disturbance == "pressure",
        }
        if case.face == "batch":
            options["sequences"] = len(texts)
        if self.adapter is not None:
            options["adapter_path"] = str(self.adapter)
        if self.cast is not None:
            options["dtype"] = self.cast
        if case.context == "kv_disk":
            options["kv_disk"] = "on"
        if case.context in PREFIX:
            options["prefix_cache"] = "on"
        else:
            options["prefill_step_size"] = self.how.step
        if case.memory == "smallest":
            # Of models as tiny as these even the slots of a ring are larger than all layers.
            options["resident"] = 0
            if case.face != "server" and case.draft != "mtp":
                options["head_resident"] = False
            if case.face == "server":  # it is not told how long prompts are
                del options["prompt"]
            if case.face == "session":  # as chat: what takes its cache back is a part of the smallest budget
                options["resumable"] = True
            options["memory"] = outcore.plan_model(str(self.folder), **options, **more).smallest_budget_bytes
        else:
            more = {"streamed": {"resident": 1}, "pools": {"experts": 3}}.get(case.memory, {})
            options |= {"memory": LARGE, **more}
        return options

    def draft(self) -> str:
        """``load``'s ``draft``."""
        kind = self.case.kind
        if self.case.draft == "model":
            return str(self.shelf.model(kind, "8bit"))
        if self.case.draft == "mtp":
            return f"mtp:{self.shelf.head(kind)}" if kind not in ("dense", "sliding") else "mtp"
        return {"copy": "self:4", "self": "self:2"}.get(self.case.draft, self.case.draft)


@functools.cache
def planned(place: Place) -> dict[str, Any]:
    """Its options: a plan for the smallest budget takes a third of a load."""
    return place._options()


def prompt_of(length: int, salt: int) -> tuple[int, ...]:
    """Tokens of which some follow each other again."""
    return tuple((7 * k * k + 3 * k + 5 * salt) % VOCABULARY for k in (i % 19 for i in range(length)))


def on_cpu() -> bool:
    """Whether MLX computes on the CPU device."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def exact(case: Case) -> bool:
    """Whether an answer's tokens are the same as mlx-lm's; else they are drawn from the same distributions. On a GPU
    rounding decides which of two tokens a random number means.

    Random numbers go to others where tokens are drafted, where texts share sweeps, and behind a disturbance in the
    middle of a text.
    """
    if case.sampling in ("greedy", "processors"):
        return True
    if not on_cpu():
        return False
    alone = case.face in ("generate", "patch", "ranks") or (case.face == "session" and case.disturbance == "none")
    return case.draft == "none" and alone


class Face:
    """A loaded model, by ``outcore.load`` and ``stream_generate``; two ranks say so by ``more``."""

    def __init__(self, place: Place, **more: Any) -> None:
        self.place, self.how, self._more = place, place.how, more
        self.drafted = self.found = 0
        self.model: Any = None

    def open(self) -> None:
        """Load the model."""
        folder, options = self.place.folder, self.place.options(**self._more)
        if self._more:
            self.model, _ = outcore.load_model(folder, **options, **self._more)
            self.tokenizer = mlx_lm.utils.load_tokenizer(folder)
        else:
            self.model, self.tokenizer = outcore.load(str(folder), **options)

    def close(self) -> None:
        """Have it gone."""
        if self.model is not None:
            metrics = self.model.outcore.metrics
            self.drafted += metrics.drafted
            self.found += metrics.prompt_found
            self.model.outcore.close()
            self.model = None

    def ask(self, texts: Sequence[Text], fault: Fault | None = None) -> list[list[int]]:
        """The answers."""
        return [self._answer(outcore.stream_generate, text, fault) for text in texts]

    def given(self, fault: Fault | None = None) -> dict[str, Any]:
        """Arguments of a text."""
        drawing = self.how.drawing(make_sampler) if self.how.sampling == "ours" else self.how.drawing()
        return self.how.settings | (drawing if fault is None else fault.through(drawing))

    def _answer(self, function: Callable[..., Any], text: Text, fault: Fault | None, **more: Any) -> list[int]:
        answer: list[int] = []
        made = function(
            self.model, self.tokenizer, list(text.prompt), max_tokens=text.tokens, **self.given(fault), **more
        )
        with contextlib.closing(made):
            for r in made:
                answer.append(r.token)
                if fault is not None and fault.leaves(len(answer)):
                    break
        return answer


class Patched(Face):
    """mlx-lm's own functions, patched."""

    def open(self) -> None:
        options = self.place.options()
        adapter = options.pop("adapter_path", None)
        self._patch = apply_patch(**options)
        self.model, self.tokenizer = mlx_lm.load(str(self.place.folder), adapter_path=adapter)[:2]

    def close(self) -> None:
        self._patch.remove()
        super().close()

    def ask(self, texts: Sequence[Text], fault: Fault | None = None) -> list[list[int]]:
        step = {} if self.place.case.context in PREFIX else {"prefill_step_size": self.how.step}
        return [self._answer(mlx_lm.stream_generate, text, fault, **step) for text in texts]


class Batch(Face):
    """``batch_generate``."""

    def ask(self, texts: Sequence[Text], fault: Fault | None = None) -> list[list[int]]:
        answers = outcore.batch_generate(
            self.model,
            self.tokenizer,
            [list(t.prompt) for t in texts],
            max_tokens=[t.tokens for t in texts],
            return_token_ids=True,
            **self.given(fault),
        )
        return [list(tokens) for tokens in answers.token_ids or ()]


class Conversation(Face):
    """Texts behind each other in one cache. The second one is disturbed, and said to its end where it can be: whoever
    leaves a text whose tokens are all in the cache has had all there is of it."""

    def ask(self, texts: Sequence[Text], fault: Fault | None = None) -> list[list[int]]:
        cache = make_prompt_cache(self.model, self.how.settings.get("max_kv_size"))
        answers: list[list[int]] = []
        held: list[int] = []
        for n, text in enumerate(texts):
            answer: list[int] = []
            left: list[int] | None = None
            if fault is not None and n == 1:
                self.model.outcore.in_cache = 0
                with disturbing(fault):
                    self._turn(text, cache, held, answer, fault)
                said = [*text.prompt, *answer]
                left = said[self.model.outcore.in_cache :]
                held += said[: len(said) - len(left)]
            if left is None or (left and len(answer) < text.tokens):
                begun, rest = text.prompt if left is None else tuple(left), text.tokens - len(answer)
                before = len(answer)
                self._turn(Text(begun, rest), cache, held, answer)
                held += [*begun, *answer[before:]]
            elif left:  # all was said, and the last token is not in the cache: its successor is not asked for
                self._turn(Text(tuple(left), 1), cache, held, [], leave_last=True)
                held += left
            answers.append(answer)
        return answers

    def _turn(
        self, text: Text, cache: list[Any], held: list[int], answer: list[int], fault: Fault | None = None, **more: Any
    ) -> None:
        given = {k: v for k, v in self.given(fault).items() if k != "max_kv_size"}
        made = outcore.stream_generate(
            self.model, self.tokenizer, list(text.prompt), max_tokens=text.tokens, prompt_cache=cache,
            history=list(held), **given, **more,
        )  # fmt: skip
        with contextlib.closing(made):  # type: ignore[type-var]
            for r in made:
                answer.append(r.token)
                if fault is not None and fault.leaves(len(answer)):
                    break


@contextlib.contextmanager
def disturbing(fault: Fault, seconds: float = 0.02) -> Iterator[None]:
    """What happens inside may be disturbed; by Ctrl-C after so many seconds."""
    try:
        with fault.within(seconds):
            yield
    except (Disturbed, KeyboardInterrupt, outcore.OutcoreError, OSError):
        if not fault.happened:
            raise


FACES: dict[str, type[Face]] = {"generate": Face, "session": Conversation, "batch": Batch, "patch": Patched}


class Clients:
    """Two clients of ``outcore serve``, which runs in this process."""

    def __init__(self, place: Place) -> None:
        self.place, self.how = place, place.how
        self.drafted = self.found = 0

    def serve(self, ask: Callable[[Clients], Any]) -> Any:
        """What ``ask`` returns, called in a thread while the server runs in this one."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        found: list[Any] = []

        def talk() -> None:
            try:
                self._until_ready(ended)
                found.append(ask(self))
                self._count()
            except BaseException as e:
                found.append(e)
            finally:
                if not ended.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)

        ended = threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        said = io.StringIO()
        client = threading.Thread(target=talk)
        client.start()
        try:
            # On a busy machine the server would end this process, because its time to drain is up.
            with (
                patch.object(Deadline, "by", lambda *_: None),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(said),
            ):
                status = main(["serve", "--model", str(self.place.folder), "--port", str(self._port), *self._flags()])
        finally:
            ended.set()
            client.join()
            signal.signal(signal.SIGTERM, before)
        if status:
            raise outcore.OutcoreError(said.getvalue().strip())
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def _flags(self) -> list[str]:
        options = self.place.options()
        for name in ("prompt", "govern"):
            options.pop(name, None)
        options.setdefault("prefix_cache", "off")
        if self.place.case.memory == "smallest":
            options["memory"] = f"{options['memory']}B"
        if "kv_bits" in self.how.settings:
            options["kv_bits"] = self.how.settings["kv_bits"]
        if self.place.case.context == "kv_disk":
            options["decode_concurrency"] = 1
        return [part for k, v in options.items() for part in ("--" + k.replace("_", "-"), str(v))]

    def _until_ready(self, ended: threading.Event) -> None:
        while not ended.wait(0.02):
            with contextlib.suppress(OSError), urllib.request.urlopen(self._url("/health"), timeout=30):
                return
        raise outcore.OutcoreError("the server did not start")

    def _count(self) -> None:
        with urllib.request.urlopen(self._url("/metrics"), timeout=30) as told:
            for line in told.read().decode().splitlines():
                if line.startswith("outcore_drafted_total"):
                    self.drafted += int(float(line.split()[-1]))
                elif line.startswith("outcore_prompt_tokens_cached_total"):
                    self.found += int(float(line.split()[-1]))

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"

    def ask(self, texts: Sequence[Text], fault: Fault | None = None) -> list[list[int]]:
        """The answers, of clients who ask at once."""
        answers: list[Any] = [None] * len(texts)

        def one(n: int) -> None:
            try:
                answers[n] = self._one(texts[n], fault, n)
            except BaseException as e:
                answers[n] = e

        clients = [threading.Thread(target=one, args=(n,)) for n in range(len(texts))]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def _one(self, text: Text, fault: Fault | None, n: int) -> list[int]:
        body: dict[str, Any] = {"prompt": list(text.prompt), "max_tokens": text.tokens, "stream": True}
        if self.how.sampling == "ours":
            body |= {"temperature": TEMPERATURE, "top_k": TOP_K, "seed": SEED + n}
        elif self.how.sampling == "processors":
            body |= PENALTY
        request = urllib.request.Request(
            self._url("/v1/completions"), json.dumps(body).encode(), {"content-type": "application/json"}
        )
        said = ""
        try:
            with urllib.request.urlopen(request, timeout=120) as lines:
                for line in lines:
                    if not line.startswith(b"data: {"):
                        continue
                    part = json.loads(line[6:])
                    if "error" in part:
                        raise outcore.OutcoreError(part["error"]["message"])
                    said += "".join(choice["text"] for choice in part["choices"])
                    if fault is not None and n == 0 and fault.leaves(len(tokens_of(said))):
                        break
        except urllib.error.HTTPError as e:
            raise outcore.OutcoreError(json.loads(e.read())["error"]["message"]) from None
        return tokens_of(said)
