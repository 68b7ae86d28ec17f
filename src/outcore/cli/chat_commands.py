"""What a line of ``outcore chat`` does: a command with a slash, or a key of ``mlx_lm.chat``; all else is a message."""

from __future__ import annotations

import gc
import os
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from ..checks import whole
from ..decode.conversation import ChatTemplate
from ..decode.sampling import check_sampling
from ..errors import OutcoreError, UsageError
from ..machine.allocator import clear_cache
from ..text import meant
from .answers import WARN, Chat
from .commands import TYPED_ELSEWHERE, Preset
from .engine import generation_options
from .flags import check_numbers, sampling_options, template_options, text_of

COMMAND = re.compile(r"/[a-z]+")
KEYS = {"h": "/help", "r": "/clear", "q": "/exit"}
LEAVE = "/exit", "/quit", "/bye"

# What ``/set`` changes: numbers, named as their flags.
SETTABLE = {"temp": float, "top-p": float, "top-k": int, "min-p": float, "max-tokens": int, "seed": int}

HELP = f"""\
/help         or h: this list
/clear        or r: begin a new conversation
/resume       continue the last conversation with this model
/save FILE    save the conversation
/load FILE    continue a saved one
/set NAME N   change {", ".join(SETTABLE)}
/system TEXT  change the system prompt; without TEXT, have none
/model NAME   go on with another model
/exit         or /quit, /bye, q, Ctrl-D: leave
Ctrl-C stops an answer. A space before / makes it a message."""
PIPED = "Each line is a message."
TYPED = "Esc Enter, or \\ at the end, begins another line; pasted text is one message."


class Commands:
    """Does what lines say.

    Args:
        prepare: checks flags, and returns the function that loads the model that they name.

    Attributes:
        chat: the chat with the open model.
    """

    def __init__(self, args: Namespace, prepare: Callable[[Namespace], Callable[[], Chat]]) -> None:
        self._args, self._prepare = args, prepare
        self.chat = prepare(args)()
        # With whether it needs an argument, and works over several machines.
        self._do: dict[str, tuple[Callable[[str], None], bool, bool]] = {
            "/help": (
                lambda _: self.chat.say(f"{HELP} {PIPED if TYPED_ELSEWHERE in os.environ else TYPED}"),
                False,
                True,
            ),
            "/clear": (lambda _: self._clear(), False, True),
            "/resume": (lambda _: self.chat.kept.resume_last(), False, False),
            "/save": (lambda file: self.chat.kept.save(Path(file)), True, False),
            "/load": (lambda file: self.chat.kept.load(Path(file)), True, False),
            "/set": (self._set, True, True),
            "/system": (self._system, False, True),
            "/model": (self._model, True, False),
        }

    def handle(self, line: str) -> bool:
        """Does what the line says. Returns False if that is to leave."""
        word, _, rest = line.strip().partition(" ")
        if line.strip() in KEYS:
            word = KEYS[line.strip()]
        elif not (line.startswith("/") and COMMAND.fullmatch(word)):
            self.chat.answer(line)
            return True
        if word in LEAVE:
            return False
        try:
            if word not in self._do:
                raise UsageError(f"no such command{meant(word, [*self._do, *LEAVE])}; /help lists them")
            do, needs, shared = self._do[word]
            if not shared and not self.chat.agreement.alone:
                raise UsageError("does not work over several machines")
            if needs and not rest.strip():
                raise UsageError(f"give a {'file' if word in ('/save', '/load') else 'name'}")
            do(rest.strip())
        except OutcoreError as e:
            self.chat.say(f"{word}: {e}", WARN)
        return True

    def close(self) -> None:
        if hasattr(self, "chat"):  # not if two models in a row could not be opened
            self.chat.kept.leave()
            self.chat.session.close()

    def _clear(self) -> None:
        self.chat.conversation.clear()
        self.chat.kept.turns = []
        self.chat.say("conversation reset")

    def _set(self, rest: str) -> None:
        name, _, given = rest.removeprefix("--").replace("=", " ").partition(" ")
        if name not in SETTABLE:
            raise UsageError(f"{name}: choose from {', '.join(SETTABLE)}{meant(name, SETTABLE)}")
        try:
            value = SETTABLE[name](given)
        except ValueError:
            raise UsageError(f"{name} {given}: give {'an integer' if SETTABLE[name] is int else 'a number'}") from None
        changed = Namespace(**vars(self._args) | {name.replace("-", "_"): value})
        check_numbers(changed)
        check_sampling(**sampling_options(changed), vocabulary=self.chat.session.vocabulary)
        if name == "seed":
            mx.random.seed(whole("--seed", value, 0, 2**64 - 1))
        self._args, self.chat.options = changed, generation_options(changed, self.chat.template.tokenizer)
        self.chat.say(f"{name} {value}")

    def _system(self, rest: str) -> None:
        chat, options = self.chat, template_options(self._args.chat_template_config)
        system = text_of("the system prompt", rest) if rest else None
        chat.retell(ChatTemplate(chat.template.tokenizer, system, options, self._args.preset.messages), chat.kept.turns)
        self._args.system_prompt = system
        chat.say(f"system prompt {'set' if rest else 'removed'}; the next answer computes the conversation anew")

    def _model(self, name: str) -> None:
        """Closes the model and opens another, within the same budget; if that fails, opens the first one again."""
        # What belongs to the first model alone is left behind.
        other = {"model": name, "revision": None, "adapter_path": None, "preset": Preset()}
        args = Namespace(**vars(self._args) | other)
        load, again = self._prepare(args), self._prepare(self._args)
        kept, records = self.chat.kept, self.chat.turns
        turns, path, keeps = kept.turns, kept.path, kept.keeps
        self.close()
        # All of it must be freed before the other is read.
        del self.chat, kept
        gc.collect()
        clear_cache()
        try:
            self.chat, self._args, why = load(), args, ""
        except (OutcoreError, KeyboardInterrupt) as e:
            self.chat, why = again(), f"/model: {str(e) or 'interrupted'}"
        self.chat.turns, self.chat.kept.path, self.chat.kept.keeps = records, path, keeps
        self.chat.retell(self.chat.template, turns)
        self.chat.greet(why)
