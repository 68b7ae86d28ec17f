"""What the APIs and the engine say to each other. No API's own words, no MLX.

A request of any API comes to a ``GenerationRequest``. What becomes of it is a sequence of events: one ``Begun``, then
for each choice any number of ``TextPart`` and ``Called`` and one ``Ended``, and one ``Finished`` at last; or a
``RequestError`` raised anywhere in between, which ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import RequestError as RequestError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; mlx-lm's arguments of these names. The defaults take the likeliest token.

    Attributes:
        seed: None: another one each time.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationRequest:
    """What a request comes to. Either ``messages`` or ``prompt``.

    Attributes:
        model: its name as the client gave it; empty: the only one, or the default.
        messages: as chat templates take them: ``role`` (system, user, assistant, tool), ``content`` (a string, or a
            list of parts, some of which a package's ``requests.OPAQUE`` has made), ``reasoning_content``,
            ``tool_calls`` (OpenAI's, but ``arguments`` an object), ``tool_call_id``, ``name``.
        prompt: a text, or token ids, to be continued as they are.
        continued: the last message is an assistant's that the answer goes on with.
        tools: functions that may be called, in OpenAI's form ``{"type": "function", "function": {...}}``.
        tool_choice: ``auto``, ``none``, ``required``, or the name of the one to be called.
        parallel_tools: whether an answer may call several.
        template_options: further arguments of the chat template, such as ``enable_thinking``.
        max_tokens: of the answer, or fewer if no more fit; None: the server's default.
        stop: strings that end the answer; not part of it.
        logprobs: of each token, with so many of the likeliest beside it; None: none.
        schema: the answer is JSON of this schema; an empty one: any JSON object. None: free text.
        choices: answers to the same prompt.
        keep_alive: seconds that the model stays loaded after this; negative: for good; None: the server's default.
    """

    model: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    continued: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tools: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    schema: Mapping[str, Any] | None = None
    choices: int = 1
    keep_alive: float | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer.

    Attributes:
        text: that it stands for; ``data``: its bytes, of which a character may take several tokens.
        logprob: natural logarithm of its probability. ``top``: the likeliest in its place, best first, without ``top``.
    """

    token: int
    text: str
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Begun:
    """The model begins to answer.

    Attributes:
        model: the name of the one that does.
        prompt_tokens: of the prompt, ``cached_tokens`` of which need not be computed.
        load_s: seconds that loading the model took, if it was loaded for this. ``queued_s``: of waiting before the
            prompt was computed, those included. ``prompt_s``: of computing it.
    """

    model: str
    prompt_tokens: int
    cached_tokens: int = 0
    load_s: float = 0.0
    queued_s: float = 0.0
    prompt_s: float = 0.0


@dataclass(frozen=True)
class TextPart:
    """More of a choice's text: of the answer, or of what is thought before it. Never half a character.

    Attributes:
        logprobs: of the tokens since the piece before, where they were asked for; their text may come later.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Called:
    """A choice calls a tool.

    Attributes:
        arguments: JSON, an object of finite numbers.
        id: of this call, such as ``call_3f...``; ``number``: its place among those of the choice, from 0.
    """

    index: int
    name: str
    arguments: str
    id: str
    number: int = 0


@dataclass(frozen=True)
class Ended:
    """A choice has ended.

    Attributes:
        reason: ``stop`` (its end, or a stop string), ``length``, or ``tool_calls``.
        stop: the stop string that ended it.
        tokens: of it, those of what was thought and of calls included; ``reasoning_tokens`` of those were thought.
    """

    index: int
    reason: Literal["stop", "length", "tool_calls"]
    tokens: int
    reasoning_tokens: int = 0
    stop: str | None = None


@dataclass(frozen=True)
class Finished:
    """All choices have ended.

    Attributes:
        tokens: of all of them.
        queued_s, prompt_s, generation_s: seconds of waiting, until the first token, and after it.
        drafted, accepted: tokens that were drafted for it, and stayed.
        choices: answers that the tokens are of; the first token of each came with its prompt.
    """

    prompt_tokens: int
    tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    queued_s: float = 0.0
    prompt_s: float = 0.0
    generation_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    choices: int = 1


Event = Begun | TextPart | Called | Ended | Finished


@dataclass(frozen=True)
class ModelCard:
    """A model that can be asked for.

    Attributes:
        created: when its files were written, seconds since 1970.
        loaded: whether it is in memory now; ``memory_bytes``: of its plan then, else 0. ``expires_at``: when it will be
            unloaded, if it will be.
        nbytes: of its weights on disk.
        family: mlx-lm's ``model_type``. ``parameters``: their number. ``quantization``: such as ``4-bit``, or ``bf16``.
        context: tokens that it was made for; None: it does not say.
        template: its chat template's text; empty: none. ``tools``, ``thinking``: what that knows of.
        config: its config.json.
        digest: of its files' names, sizes and times, 64 hexadecimal digits.
    """

    name: str
    created: int = 0
    loaded: bool = False
    memory_bytes: int = 0
    expires_at: float | None = None
    nbytes: int = 0
    family: str = ""
    parameters: int = 0
    quantization: str = ""
    context: int | None = None
    template: str = ""
    tools: bool = False
    thinking: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""


RETRY_S = 5.0
"""Seconds after which a client that was sent away may ask again."""


def shutting_down() -> RequestError:
    """What a request is told that comes too late, or takes too long then."""
    return RequestError("the server is shutting down", "shutting_down", status=503, retry_after=RETRY_S)
