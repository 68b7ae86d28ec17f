"""The data that APIs and the engine exchange: requests, events of an answer, and model cards. No API's words, no MLX.

An answer is a sequence of events: one ``Begun``; for each choice any number of ``TextPart`` and ``Called``, then one
``Ended``; and one ``Finished``. A ``RequestError`` may be raised at any point and ends the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import RequestError as RequestError


@dataclass(frozen=True)
class Sampling:
    """mlx-lm's sampling arguments of these names. The defaults are greedy; ``seed`` None draws a new one each time."""

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
    post_sampling_probs: bool = False  # reported are the log-probabilities that tokens are drawn with


@dataclass(frozen=True)
class GenerationRequest:
    """A request of any API, translated. It has either ``messages`` or ``prompt``.

    Attributes:
        model: the name that the client gave; empty: the default model.
        messages: in the form of chat templates: ``role`` (system, user, assistant, tool), ``content`` (a string, or a
            list of parts, some made by a package's ``requests.OPAQUE``), ``reasoning_content``, ``tool_calls``
            (OpenAI's, with ``arguments`` as an object), ``tool_call_id``, ``name``.
        prompt: text or token ids to continue as they are.
        continued: the answer continues the last message, which is the assistant's.
        tools: in OpenAI's form ``{"type": "function", "function": {...}}``.
        tool_choice: ``auto``, ``none``, ``required``, or the name of the tool to call.
        parallel_tools: one answer may call several tools.
        template_options: further arguments of the chat template, such as ``enable_thinking``.
        max_tokens: limit of each choice; None: the server's default.
        stop: strings that end a choice and are not part of it.
        logprobs: number of likeliest tokens to report with each token's log-probability; None: report none.
        form: of the answer: a JSON schema (empty: any JSON object), or a grammar in llama.cpp's GBNF. None: free text.
        choices: number of answers to the same prompt.
        keep_alive: seconds that the model then stays loaded; negative: for ever; None: the server's default.
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
    form: Mapping[str, Any] | str | None = None
    choices: int = 1
    keep_alive: float | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """The natural log-probability of a token.

    Attributes:
        data: the token's bytes, which may be only part of a character.
        top: the likeliest tokens at this position, best first.
    """

    token: int
    text: str
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Begun:
    """The prompt is computed, and a choice begins.

    Attributes:
        cached_tokens: tokens of the prompt that came from the prefix cache.
        load_s: seconds of loading the model, if this request loaded it.
        queued_s: seconds from the request to the start of its prompt, loading included.
        prompt_s: seconds of computing the prompt.
    """

    model: str
    prompt_tokens: int
    cached_tokens: int = 0
    load_s: float = 0.0
    queued_s: float = 0.0
    prompt_s: float = 0.0


@dataclass(frozen=True)
class TextPart:
    """More text of a choice, or more of its reasoning, in whole characters.

    Attributes:
        logprobs: of the tokens since the previous part, if requested; their text may come later.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Called:
    """A choice calls a tool.

    Attributes:
        arguments: a JSON object of finite numbers, as text.
        id: such as ``call_3f...``.
        number: position among the choice's calls, from 0.
    """

    index: int
    name: str
    arguments: str
    id: str
    number: int = 0


@dataclass(frozen=True)
class Ended:
    """A choice has ended; ``stop`` is the stop string that ended it, ``tokens`` counts reasoning and calls too."""

    index: int
    reason: Literal["stop", "length", "tool_calls"]
    tokens: int
    reasoning_tokens: int = 0
    stop: str | None = None


@dataclass(frozen=True)
class Finished:
    """All choices have ended; token counts are sums over them.

    Attributes:
        queued_s, prompt_s, generation_s: seconds of waiting, of the prompt up to the first token, and after it.
        drafted, accepted: tokens proposed by the drafter, and those that the model accepted.
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
    """The facts that the server's APIs report about a model.

    Attributes:
        created: modification time of its files, seconds since 1970.
        memory_bytes: peak bytes by its plan while it is loaded, else 0.
        expires_at: time at which the model will be unloaded; None: never, or it is not loaded.
        nbytes: bytes of its weights on disk.
        family: mlx-lm's ``model_type``.
        quantization: such as ``4-bit`` or ``bf16``.
        context: length in tokens that it was made for; None: its configuration does not say.
        template: text of its chat template.
        digest: 64 hexadecimal digits made from its folder and its files' sizes and times.
        images: most ``pixels`` and ``bytes`` of an image, and their ``count`` in a request; empty: it reads text only.
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
    images: Mapping[str, int] = field(default_factory=dict)


# Value of ``Retry-After`` for requests that are refused because the server is busy, in seconds.
RETRY_S = 5.0


def shutting_down() -> RequestError:
    return RequestError("the server is shutting down", "shutting_down", status=503, retry_after=RETRY_S)
