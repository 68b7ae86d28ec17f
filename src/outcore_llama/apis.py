"""llama.cpp's own addresses, and its fields of OpenAI's chats. Texts within a list of tokens or in
``logit_bias`` are made into tokens here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from outcore.checks import COUNT
from outcore.serve import completions, openai, requests
from outcore.serve.api import Api, Handled, HttpRequest, ParsedRequest, ResponseWriter, Route, counted, finite
from outcore.serve.events import Begun, Ended, Event, Finished, GenerationRequest, TextPart, TokenLogprob
from outcore.serve.openai import MOST_CHOICES, timings
from outcore.serve.prompting import Prompt
from outcore.serve.requests import Body, read
from outcore.serve.service import ModelService

Text = str | tuple[int | str, ...]
Id = Annotated[int, Field(ge=0, le=COUNT)]
Bias = tuple[Id | str, requests.Change | Literal[False]]
Whole = Annotated[int, Field(ge=-COUNT, le=COUNT)]  # negative: none, or no limit
Window = Annotated[Whole, AfterValidator(lambda n: COUNT if n < 0 else n)]


def _pairs(value: Any) -> Any:
    if isinstance(value, dict):  # names are strings, even if they are ids
        return [(int(name) if name.isdecimal() and len(name) < 10 else name, add) for name, add in value.items()]
    if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return [tuple(pair) for pair in value]
    raise requests.wrong("logit_bias", "give pairs of a token id or a text and a number, or an object of them")


PROBS = {False: "logprob", True: "prob"}
Biases = Annotated[list[Bias], BeforeValidator(_pairs), Field(max_length=1024)]


class CompletionBody(requests.SamplerFields):
    silent = frozenset({
        "cache_prompt", "id_slot", "samplers", "min_keep", "dynatemp_exponent", "mirostat_tau", "mirostat_eta",
        "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "t_max_predict_ms",
        "n_cache_reuse", "backend_sampling", "timings_per_token",
    })  # fmt: skip
    refused = {
        "dry_multiplier": (0, 0.0), "dynatemp_range": (0, 0.0), "ignore_eos": (False,), "image_data": ([],),
        "lora": ([],), "mirostat": (0,), "n_discard": (0,), "n_indent": (0,), "n_keep": (0,),
        "return_progress": (False,), "typical_p": (1, 1.0),
    }  # fmt: skip

    model: str = ""
    prompt: Any
    stream: bool = False
    n_predict: Whole | None = Field(None, validation_alias=AliasChoices("n_predict", "max_tokens"))
    n_probs: requests.TopLogprobs = 0
    post_sampling_probs: bool = False
    top_k: Annotated[Whole, AfterValidator(lambda k: max(k, 0))] | None = None
    repetition_penalty: requests.Factor | None = Field(None, validation_alias="repeat_penalty")
    repetition_context_size: Window | None = Field(None, validation_alias="repeat_last_n")
    logit_bias: Biases = []  # type: ignore[assignment]
    stop: requests.Stops = ()
    json_schema: dict[str, Any] | None = None
    grammar: str = ""
    return_tokens: bool = False
    response_fields: list[str] = []


async def completion(http: HttpRequest) -> ParsedRequest:
    body = requests.read(CompletionBody, http.body)
    several = isinstance(body.prompt, list) and all(type(part) is not int for part in body.prompt)
    given = body.prompt if several else [body.prompt]
    if not 1 <= len(given) <= MOST_CHOICES:
        raise requests.wrong("prompt", f"{len(given)} prompts; give 1 to {MOST_CHOICES}")
    prompts = [plain_text(one, "prompt") for one in given]
    base, bias = http.defaults.sampling, dict[int, float]()
    for name, add in body.logit_bias:
        tokens = await tokens_of(http.service, body.model, (name,), special=False)
        bias |= dict.fromkeys(tokens, -requests.LARGE if add is False else float(add))
    sampling, most = requests.sampling_of(body, base), body.n_predict
    if body.post_sampling_probs and sampling.xtc_probability:
        raise requests.wrong("post_sampling_probs", "not supported with XTC", requests.UNSUPPORTED)
    seed = None if body.seed == -1 else sampling.seed
    request = GenerationRequest(
        model=body.model,
        max_tokens=http.defaults.max_tokens if most is None else most if most > 0 else COUNT,
        sampling=replace(sampling, logit_bias=bias or base.logit_bias, seed=seed),
        stop=body.stop,
        logprobs=body.n_probs if body.n_probs or body.stream or body.return_tokens else None,
        form=body.grammar or body.json_schema,
    )
    texts = [p if isinstance(p, str) else tuple(await tokens_of(http.service, body.model, p)) for p in prompts]
    return ParsedRequest(tuple(replace(request, prompt=t) for t in texts), LlamaWriter(body, request, prompts))


def plain_text(value: Any, where: str) -> Text:
    """A string, or token ids and strings by turns."""
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise requests.wrong(where, "multimodal_data is not supported: models read text only", requests.UNSUPPORTED)
        value = value.get("prompt_string")
    if isinstance(value, str) and value:
        return value
    parts = value if isinstance(value, list) else []
    if parts and all(isinstance(part, str) or (type(part) is int and 0 <= part <= COUNT) for part in parts):
        return tuple(parts)
    raise requests.wrong(where, "give a string, or a list of token ids and strings, not an empty one")


async def tokens_of(service: ModelService, model: str, parts: Text, *, special: bool = True) -> list[int]:
    """The tokens of a text; ``special``: with those that the tokenizer adds at its beginning."""
    tokens: list[int] = []
    for n, part in enumerate((parts,) if isinstance(parts, str) else parts):
        if isinstance(part, int):
            tokens.append(part)
        elif part:
            prompt, whole = await service.prompt(GenerationRequest(model, prompt=part)), special and n == 0
            tokens += prompt.tokens if whole else prompt.tokenizer.encode(part, add_special_tokens=False)
    return tokens


def text_of(prompt: Prompt) -> str:
    return str(prompt.tokenizer.decode(list(prompt.tokens)))


class LlamaWriter(ResponseWriter):
    """Writes an object for each prompt, or a stream with one for each token and a last one for each prompt."""

    def __init__(self, body: CompletionBody, request: GenerationRequest, prompts: Sequence[Text]) -> None:
        super().__init__(body.stream, body.ignored())
        self._body, self._prompts, s = body, prompts, request.sampling
        self._settings = vars(s) | {
            "n_predict": -1 if request.max_tokens is None else request.max_tokens,
            "seed": -1 if s.seed is None else s.seed, "repeat_penalty": s.repetition_penalty,
            "repeat_last_n": s.repetition_context_size, "stop": list(request.stop), "n_probs": body.n_probs,
            "grammar": body.grammar, "logit_bias": list(s.logit_bias.items()),
        }  # fmt: skip
        self._model, self._ends = "", [Ended(i, "stop", 0) for i in range(len(prompts))]
        self._counts, self._lines = [0] * len(prompts), [False] * len(prompts)

    def steps(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Begun():
                self._model = event.model
            case Ended():
                self._ends[event.index] = event
            case TextPart():
                yield from self._part(event)
            case Finished():
                yield from (self._last(end, event) for end in self._ends)

    def _part(self, part: TextPart) -> Iterator[dict[str, Any]]:
        """An object for each token; the text is the last one's."""
        i, text = part.index, part.reasoning + part.text
        self._lines[i] |= "\n" in text
        for left, token in zip(range(len(part.logprobs) or 1)[::-1], part.logprobs or (None,), strict=True):
            self._counts[i] += token is not None
            step: dict[str, Any] = {"index": i, "content": "" if left else text, "stop": False}
            step |= {"tokens": [] if token is None else [token.token], "tokens_predicted": self._counts[i]}
            if self._body.n_probs and token is not None:
                drawn = self._body.post_sampling_probs
                top = [_entry(other, drawn) for other in token.top if not drawn or math.exp(other.logprob)]
                step["completion_probabilities"] = [_entry(token, drawn) | {f"top_{PROBS[drawn]}s": top}]
            yield step

    def _last(self, end: Ended, finished: Finished) -> dict[str, Any]:
        return {
            "index": end.index, "content": "", "tokens": [], "id_slot": -1, "stop": True, "model": self._model,
            "tokens_predicted": end.tokens, "tokens_evaluated": finished.prompt_tokens,
            "generation_settings": self._settings, "prompt": self._prompts[end.index],
            "has_new_line": self._lines[end.index], "truncated": False,
            "stop_type": "word" if end.stop is not None else "limit" if end.reason == "length" else "eos",
            "stopping_word": end.stop or "", "tokens_cached": finished.cached_tokens, "timings": timings(finished),
        }  # fmt: skip

    def whole(self, events: Sequence[Event]) -> Any:
        steps = [step for event in events for step in self.steps(event)]
        found, lists = [], {"tokens": self._body.return_tokens, "completion_probabilities": self._body.n_probs}
        for last in steps[-len(self._prompts) :]:
            parts = [step for step in steps if step["index"] == last["index"] and not step["stop"]]
            whole = last | {"content": "".join(part["content"] for part in parts)}
            whole |= {name: [v for part in parts for v in part.get(name, ())] for name, told in lists.items() if told}
            found.append(self._chosen(whole) if self._body.response_fields else whole)
        return found if len(found) > 1 else found[0]

    def _chosen(self, whole: Any) -> dict[str, Any]:
        """The fields that the client wants; ``a/b`` is b within a."""
        found = {
            name: reduce(lambda held, part: held.get(part) if isinstance(held, dict) else None, name.split("/"), whole)
            for name in self._body.response_fields
        }
        return {name: value for name, value in found.items() if value is not None}


def _entry(token: TokenLogprob, drawn: bool) -> dict[str, Any]:
    value = math.exp(token.logprob) if drawn else finite(token.logprob)
    return {"id": token.token, "token": token.text, PROBS[drawn]: value, "bytes": list(token.data)}


class TokenizeBody(Body):
    silent = frozenset({"parse_special"})

    model: str = ""
    content: str = ""
    add_special: bool = False
    with_pieces: bool = False
    tokens: list[Any] = []


class ChatBody(openai.ChatBody):
    refused = {name: values for name, values in openai.ChatBody.refused.items() if name != "grammar"}

    grammar: str = ""
    verbose: bool = False


def either(http: HttpRequest) -> Handled:
    """``/completions`` is llama.cpp's, but clients of OpenAI's, which always name a model, may ask it too."""
    return completions.completion(http) if "model" in http.body else completion(http)


def chat(http: HttpRequest) -> Handled:
    if not http.body.get("grammar") and not http.body.get("verbose"):
        return openai.chat(http)
    body = read(ChatBody, http.body)
    others = {name: value for name, value in http.body.items() if name != "grammar"}
    (request,) = openai.chat(replace(http, body=others)).requests
    return _chat(http, body, replace(request, form=body.grammar or request.form))


async def _chat(http: HttpRequest, body: ChatBody, request: GenerationRequest) -> ParsedRequest:
    writer = openai.ChatWriter(body, body.n, logprobs=body.logprobs)
    if body.verbose:
        writer.head["__verbose"] = {"prompt": text_of(await http.service.prompt(request))}
    return ParsedRequest((request,), writer)


async def tokenize(http: HttpRequest) -> dict[str, Any]:
    body = read(TokenizeBody, http.body)
    tokens = await tokens_of(http.service, body.model, body.content, special=body.add_special)
    if not body.with_pieces or not tokens:
        return {"tokens": tokens}
    tokenizer = (await http.service.prompt(GenerationRequest(body.model, prompt=tuple(tokens)))).tokenizer
    return {"tokens": [{"id": token, "piece": tokenizer.decode([token])} for token in tokens]}


async def detokenize(http: HttpRequest) -> dict[str, Any]:
    body = read(TokenizeBody, http.body)
    tokens = await tokens_of(http.service, body.model, plain_text(body.tokens, "tokens")) if body.tokens else []
    request = GenerationRequest(body.model, prompt=tuple(tokens))
    return {"content": text_of(await http.service.prompt(request)) if tokens else ""}


async def apply_template(http: HttpRequest) -> dict[str, Any]:
    return {"prompt": text_of(await http.service.prompt(openai.chat(http).requests[0]))}


async def count(http: HttpRequest) -> dict[str, Any]:
    return await counted(http, openai.chat(http).requests[0])


async def slots(http: HttpRequest) -> list[dict[str, Any]]:
    """The places for answers that share a forward pass; those who wait for one count as having it."""
    state = http.service.state()
    taken = state["running"] + state["waiting"]
    return [{"id": n, "is_processing": n < taken} for n in range(http.service.options.most)]


ROUTES = (
    Route("/completion", completion, "POST"),
    Route("/completions", either, "POST"),
    *(Route(f"{at}/chat/completions", chat, "POST") for at in ("/v1", "")),
    *(Route(f"{at}/chat/completions/input_tokens", count, "POST") for at in ("/v1", "")),
    Route("/tokenize", tokenize, "POST"),
    Route("/detokenize", detokenize, "POST"),
    Route("/apply-template", apply_template, "POST"),
    Route("/slots", slots),
)

# The addresses that are OpenAI's too are taken by every request with this header, as those with a body have.
APIS = (Api("llama.cpp", openai.error_body, ROUTES, header="content-type"),)
