"""``--modelfile``: sets flags that were not given, and what no flag can set. Imports no MLX until it is used."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from outcore.cli.commands import ArgumentParser, Preset
from outcore.errors import UsageError
from outcore.machine.settings import Setting
from outcore.text import counted

from .options import Modelfile, read_modelfile

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from outcore.serve.api import Defaults
    from outcore.serve.events import Event, GenerationRequest
    from outcore.serve.prompting import Prompt
    from outcore.serve.service import ModelService

# Values of a Modelfile, and the flag that sets the same.
FLAGS = {
    "model": "model",
    "adapter": "adapter_path",
    "draft": "draft",
    "system": "system_prompt",
    "num_ctx": "context",
    "num_predict": "max_tokens",
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "draft_num_predict": "num_draft_tokens",
}


def add_flag(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--modelfile",
        metavar="FILE",
        help="Take the model, its template and options from an Ollama Modelfile; flags take precedence. Default: none.",
    )
    parser.fill = settle


def settle(parser: ArgumentParser, args: argparse.Namespace) -> dict[str, Setting]:
    """Sets flags that the Modelfile gives and the command line does not; ``args.preset`` applies the rest. Returns the
    flags that were set, by name in ``args``, with the place in the Modelfile. Raises ``UsageError``, which names the
    line, if the file cannot be used."""
    if args.modelfile is None:
        return {}
    modelfile = read_modelfile(args.modelfile)
    args.preset = ModelfilePreset(modelfile)
    given = _given(parser, args.argv)
    several = parser.prog == "outcore serve"
    if "models_named" in given:
        given |= {"model"}
    filled: dict[str, Setting] = {}
    for attribute, name in FLAGS.items():
        value: Any = modelfile.get(attribute)
        if attribute == "draft_num_predict" and value == 0:
            name, value = "draft", None if given & {"draft", "num_draft_tokens"} else "none"
        if value is None or name in given or not hasattr(args, name):
            continue
        if attribute == "seed" and value < 0:
            value = secrets.randbits(32)
        setattr(args, name, [value] if several and attribute == "model" else value)
        filled[name] = Setting(str(modelfile.get(attribute)), modelfile.line(attribute))
    return filled


def _given(parser: ArgumentParser, words: Sequence[str]) -> set[str]:
    """Returns the names of the flags on a command line."""
    defaults = [(action, action.default) for action in parser._actions]
    try:
        for action, _ in defaults:
            action.default = argparse.SUPPRESS
        found = vars(parser.parse_known_args(list(words))[0])
    finally:
        for action, default in defaults:
            action.default = default
    return {"model" if name == "model_named" else name for name in found}


class ModelfilePreset(Preset):
    """Applies the values of a Modelfile that no flag can set. The methods are ``Preset``'s."""

    def __init__(self, modelfile: Modelfile) -> None:
        self.modelfile = modelfile
        self.messages, self.stop = modelfile.messages, modelfile.stop

    def prepare(self, tokenizer: TokenizerWrapper, *, template: bool = True, cached: bool = False) -> None:
        modelfile = self.modelfile
        before = next((name for name in ("system", "messages") if name in modelfile.lines), None)
        if before is not None and cached:
            raise UsageError(
                f"{modelfile.line(before)}: --prompt-cache-file already contains the text before the question; leave "
                "one of the two out"
            )
        if template and before is not None and not tokenizer.has_chat_template:
            raise UsageError(f"{modelfile.line(before)}: this model has no chat template")

    def answer_tokens(self, prompt: int, most: int) -> int:
        context = self.modelfile.get("num_ctx")
        if context is None:
            return most
        room: int = context - prompt
        if room < 1:
            raise UsageError(
                f"{self.modelfile.line('num_ctx')}: num_ctx {context} leaves no room for an answer to a prompt of "
                f"{counted(prompt, 'token')}; give more, or a shorter prompt"
            )
        return room if most < 0 else min(room, most)

    def options(self) -> dict[str, Any]:
        penalties: dict[str, Any] = self.modelfile.penalties()
        if not penalties:
            return {}
        from mlx_lm.sample_utils import make_logits_processors

        return {"logits_processors": make_logits_processors(None, **penalties)}

    def defaults(self, defaults: Defaults) -> Defaults:
        seed = self.modelfile.get("seed")
        seed = None if seed is None or seed < 0 else seed
        penalties: dict[str, Any] = self.modelfile.penalties()
        return replace(defaults, sampling=replace(defaults.sampling, seed=seed, **penalties))

    def service(self, service: ModelService) -> ModelService:
        if len(service.models()) != 1:
            raise UsageError(f"--modelfile {self.modelfile.path}: a Modelfile is for one model; serve only that one")
        return cast(
            "ModelService", Prefaced(service, self.modelfile.system, self.modelfile.messages, self.modelfile.stop)
        )


@dataclass(frozen=True)
class Prefaced:
    """Wraps a service: adds a Modelfile's texts to requests that leave them out, by Ollama's rules.

    Attributes:
        system: for conversations that do not begin with a system message; None: no system prompt.
        messages: go before a conversation's own.
        stop: for requests without stop strings.
    """

    service: ModelService
    system: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()

    def prefaced(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with system prompt, messages and stop strings added."""
        messages = request.messages
        if messages is not None:
            own = bool(messages) and messages[0].get("role") == "system"
            system = [{"role": "system", "content": self.system}] if self.system is not None and not own else []
            # The client's own system message stays first.
            messages = (*messages[:own], *system, *self.messages, *messages[own:])
        return replace(request, messages=messages, stop=request.stop or self.stop)

    def answer(self, *requests: GenerationRequest) -> AsyncGenerator[Event, None]:
        return self.service.answer(*map(self.prefaced, requests))

    async def prompt(self, request: GenerationRequest) -> Prompt:
        return await self.service.prompt(self.prefaced(request))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)
