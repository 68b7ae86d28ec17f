"""Vectors and ratings of a server: OpenAI's embeddings, Ollama's, and the rerank form of Cohere and Jina.

Requests that wait at the same time share readings of the weights (``JobQueue``). Between two readings the engine's
thread does what else is to be done, so a chat with another model waits for one reading, and the rest for its answer.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from outcore.checks import COUNT
from outcore.errors import BudgetError, OutcoreError, RequestError, UsageError
from outcore.serve import openai
from outcore.serve.api import Api, HttpRequest, Route
from outcore.serve.choice import as_request_error
from outcore.serve.requests import Body, Count, read, wrong
from outcore.serve.service import ModelService
from outcore.serve.shelf import Offered

from .embedder import Embedder, shortened_to
from .kinds import EMBED, RERANK, task_of
from .texts import Encoded, TextReader

# Most texts of a request, as in OpenAI's API.
MOST_TEXTS = 2048

# Seconds between attempts while another model answers, and until the last one.
AGAIN_S, LAST_S = 0.2, 600.0

DOES = {EMBED: "makes no vectors", RERANK: "rates no documents"}


@dataclass(eq=False)
class Job:
    """A request's texts. ``found``: their vectors until now; ``wanted``: the client still waits."""

    texts: Sequence[Encoded]
    found: list[Any] = field(default_factory=list)
    wanted: bool = True

    @property
    def left(self) -> Sequence[Encoded]:
        return self.texts[len(self.found) :] if self.wanted else ()


class JobQueue:
    """One model's jobs. Each turn on the engine's thread is a reading of the weights for the texts of several jobs."""

    def __init__(self, service: ModelService, model: Offered, task: str) -> None:
        self._service, self.model = weakref.ref(service), model
        self._jobs, self._lock = list[Job](), threading.Lock()
        trusts = service.options.load.trust_remote_code
        self.reader = TextReader(model.folder, task, trust_remote_code=trusts)

    async def vectors(self, texts: Sequence[Encoded]) -> list[Any]:
        """Returns the texts' vectors. Raises RequestError: no memory for them, another model answers for too long."""
        job, last = Job(texts), time.monotonic() + LAST_S
        with self._lock:
            self._jobs.append(job)
        try:
            while job.left:
                service = self._service()
                assert service is not None
                try:
                    await asyncio.shield(asyncio.wrap_future(service.engine.call(functools.partial(self._turn, job))))
                except RequestError as e:
                    if e.code != "busy" or time.monotonic() > last:
                        raise
                    await asyncio.sleep(AGAIN_S)
                except OutcoreError as e:
                    raise as_request_error(e) from e
        finally:
            with self._lock:
                job.wanted = False
                self._jobs.remove(job)
        return job.found

    def _turn(self, job: Job) -> None:
        """Computes a reading's worth of the waiting texts, this job's first; on the engine's thread."""
        if not job.left:  # computed with others, or nobody waits
            return
        embedder = self._loaded()
        with self._lock:
            jobs = [job, *(each for each in self._jobs if each is not job and each.left)]
        waiting = [(each, text) for each in jobs for text in each.left]
        some = embedder.next_of([text for _, text in waiting])
        try:
            vectors = embedder.run(some)
        except BudgetError:
            if len(own := some[: len(job.left)]) == len(some):
                raise
            vectors = embedder.run(own)  # another's text may be the one that is too long
        for (each, _), vector in zip(waiting, vectors, strict=False):
            each.found.append(vector)

    def _loaded(self) -> Embedder:
        service = self._service()
        assert service is not None
        service.engine.keep(self.model.name, None)
        assert service.engine.loaded is not None
        model = service.engine.loaded.model
        # With the model, so that nothing else keeps its weights when it is unloaded.
        embedder: Embedder = model.__dict__.setdefault("outcore_embedder", Embedder(model, self.reader))
        return embedder


_queues: weakref.WeakKeyDictionary[ModelService, dict[Path, JobQueue]] = weakref.WeakKeyDictionary()

# A tokenizer may be used by one thread at a time.
_tokenizing = threading.Lock()


def _named(http: HttpRequest, name: str | None, task: str) -> Offered:
    model = http.service.shelf.named(name or "")
    if (does := task_of(model.folder)) != task:
        other = {EMBED: "makes vectors", RERANK: "rates documents"}.get(does or "", "writes text")
        why = f"{model.name} {other} and {DOES[task]}: serve a model that does"
        raise RequestError(why, "unsupported_model", param="model")
    return model


async def _computed(
    http: HttpRequest, model: Offered, task: str, encode: Callable[[TextReader], list[Encoded]], *, cuts: bool
) -> tuple[list[Any], int]:
    """Returns vectors or ratings, and how many tokens the texts have; ``cuts``: too long texts are cut."""

    def prepared() -> tuple[JobQueue, list[Encoded]]:
        with _tokenizing:
            known = _queues.setdefault(http.service, {})
            if model.folder not in known:
                known[model.folder] = JobQueue(http.service, model, task)
            jobs = known[model.folder]
            texts = encode(jobs.reader)
        for n, text in enumerate(texts):
            if not len(text.ids):
                raise wrong(f"input[{n}]", "has no tokens")
            if text.cut and not cuts:
                why = f"has more than {jobs.reader.limit} tokens, this model's most: shorten it"
                raise wrong(f"input[{n}]", why, "context_length_exceeded")
        return jobs, texts

    try:
        jobs, texts = await asyncio.to_thread(prepared)
    except RequestError:
        raise
    except OutcoreError as e:
        raise as_request_error(e) from e
    return await jobs.vectors(texts), sum(len(text.ids) for text in texts)


def _shortened(vectors: Sequence[Any], dimensions: int | None) -> list[Any]:
    if vectors and vectors[0].ndim > 1:
        raise RequestError("this model makes a vector for each token, which this form has no place for")
    try:
        return [shortened_to(vector, dimensions) for vector in vectors]
    except UsageError as e:
        raise wrong("dimensions", str(e).partition(": ")[2]) from None


def _inputs(value: Any, where: str) -> list[str | list[int]]:
    """Returns the texts of a request, some of them as tokens."""
    given = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not 1 <= len(given) <= MOST_TEXTS:
        raise wrong(where, f"{len(given)} texts; give 1 to {MOST_TEXTS}")
    for n, one in enumerate(given):
        if not (isinstance(one, str) and one) and not _is_ids(one):
            raise wrong(where if given is not value else f"{where}[{n}]", "give a string or a list of token ids")
    return given


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(t) is int and 0 <= t <= COUNT for t in value)


def _encode(given: Sequence[str | list[int]], where: str, vocabulary: Any, reader: TextReader) -> list[Encoded]:
    texts = iter(reader.encode([one for one in given if isinstance(one, str)]))
    found: list[Encoded] = []
    for n, one in enumerate(given):
        if isinstance(one, str):
            found.append(next(texts))
            continue
        if isinstance(vocabulary, int) and max(one) >= vocabulary:
            raise wrong(f"{where}[{n}]", f"the model has no token {max(one)}")
        found.append(Encoded(one[: reader.limit], cut=len(one) > reader.limit))
    return found


def _vocabulary(model: Offered) -> Any:
    text = model.config.get("text_config")
    return model.config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)


class EmbeddingsBody(Body):
    input: Any
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None


def embeddings(http: HttpRequest) -> Awaitable[Any]:
    body = read(EmbeddingsBody, http.body)
    model, given = _named(http, body.model, EMBED), _inputs(body.input, "input")

    async def answer() -> dict[str, Any]:
        encode = functools.partial(_encode, given, "input", _vocabulary(model))
        vectors, tokens = await _computed(http, model, EMBED, encode, cuts=False)
        vectors = _shortened(vectors, body.dimensions)
        written = _base64 if body.encoding_format == "base64" else lambda vector: vector.tolist()
        data = [{"object": "embedding", "index": n, "embedding": written(v)} for n, v in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": model.name, "usage": usage}

    return answer()


def _base64(vector: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()


class OllamaBody(Body):
    model: str | None = None
    input: Any = None
    prompt: Any = None
    truncate: bool = True
    dimensions: Count | None = None
    keep_alive: Any = None


def _ollama(http: HttpRequest, body: OllamaBody, given: Any, where: str) -> Callable[[], Awaitable[dict[str, Any]]]:
    model = _named(http, (body.model or "").removesuffix(":latest"), EMBED)
    texts = _inputs(given, where)

    async def answer() -> dict[str, Any]:
        began = time.monotonic()
        encode = functools.partial(_encode, texts, where, _vocabulary(model))
        vectors, tokens = await _computed(http, model, EMBED, encode, cuts=body.truncate)
        found = [v.tolist() for v in _shortened(vectors, body.dimensions)]
        took = round((time.monotonic() - began) * 1e9)
        times = {"total_duration": took, "load_duration": 0, "prompt_eval_count": tokens}
        return {"model": body.model or model.name, "embeddings": found, **times}

    return answer


def embed(http: HttpRequest) -> Awaitable[Any]:
    body = read(OllamaBody, http.body)
    return _ollama(http, body, body.input, "input")()


def embed_one(http: HttpRequest) -> Awaitable[Any]:
    """Ollama's older form: one text, and nothing but its vector."""
    body = read(OllamaBody, http.body)
    answer = _ollama(http, body, body.prompt, "prompt")

    async def one() -> dict[str, Any]:
        return {"embedding": (await answer())["embeddings"][0]}

    return one()


class RerankBody(Body):
    model: str | None = None
    query: str
    documents: list[Any]
    top_n: Count | None = None
    return_documents: bool = False
    instruction: str | None = None


def rerank(http: HttpRequest) -> Awaitable[Any]:
    body = read(RerankBody, http.body)
    model = _named(http, body.model, RERANK)
    if not body.query:
        raise wrong("query", "is empty")
    if not 1 <= len(body.documents) <= MOST_TEXTS:
        raise wrong("documents", f"{len(body.documents)} texts; give 1 to {MOST_TEXTS}")
    texts: list[str] = []
    for n, document in enumerate(body.documents):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str) or not text:
            raise wrong(f"documents[{n}]", "give a string, or an object with text")
        texts.append(text)

    async def answer() -> dict[str, Any]:
        found, tokens = await _computed(
            http, model, RERANK, lambda reader: reader.pairs(body.query, texts, body.instruction), cuts=True
        )
        scores = [float(v[0]) for v in found]
        best = sorted(range(len(scores)), key=lambda n: (-scores[n], n))[: body.top_n]
        results = [
            {"index": n, "relevance_score": scores[n]}
            | ({"document": {"text": texts[n]}} if body.return_documents else {})
            for n in best
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"model": model.name, "results": results, "usage": usage}

    return answer()


OPENAI = Api(
    "openai",
    openai.error_body,
    tuple(
        route
        for prefix in ("/v1", "")
        for route in (
            Route(f"{prefix}/embeddings", embeddings, "POST"),
            Route(f"{prefix}/rerank", rerank, "POST"),
        )
    ),
)
OLLAMA = Api(
    "ollama",
    lambda error: {"error": str(error)},
    (Route("/api/embed", embed, "POST"), Route("/api/embeddings", embed_one, "POST")),
)
APIS = (OPENAI, OLLAMA)
