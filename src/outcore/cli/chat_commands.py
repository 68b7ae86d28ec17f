"""What a line of ``outcore chat`` does: a command with a slash, or a key of ``mlx_lm.chat``; all else is a message."""

from __future__ import annotations

import gc
import os
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from ..checks import whole
from ..decode.conversation import ChatTemplate
from ..decode.sampling import check_sampling
from ..errors import OutcoreError, UsageError
from ..machine.allocator import clear_cache
from ..text import counted, meant
from .answers import WARN, Chat
from .commands import TYPED_ELSEWHERE, Preset, parser_of
from .engine import generation_options, model_folder, open_images
from .flags import check_numbers, sampling_options, template_options, text_of

COMMAND = re.compile(r"/[a-z]+")
SAME = {"h": "/help", "/?": "/help", "r": "/clear"} | dict.fromkeys(("q", "exit", "quit", "/quit", "/bye"), "/exit")
SETTABLE = "temp", "top-p", "top-k", "min-p", "max-tokens", "seed"  # flags
NEEDED = {"/save": "file", "/load": "file", "/model": "name", "/image": "file"}

HELP = f"""\
/help         or /?, h: this list
/clear        or r: begin a new conversation
/resume       continue the last conversation with this model
/image FILE   an image for the next message: a file or an address
/save FILE    save the conversation
/load FILE    continue a saved one
/set NAME N   change {", ".join(SETTABLE)}; without N, show them
/system TEXT  change the system prompt; without TEXT, have none
/model NAME   go on with another model
/exit         or /quit, /bye, q, exit, quit, Ctrl-D: leave
Ctrl-C stops an answer. A space before / makes it a message."""
PIPED = "Each line is a message."
TYPED = "Esc Enter, or \\ at the end, begins another line; pasted text is one message."


class Commands:
    """Does what lines say. ``prepare`` checks flags, and returns the function that loads the model that they name."""

    def __init__(self, args: Namespace, prepare: Callable[[Namespace], Callable[[], Chat]]) -> None:
        self._args, self._prepare = args, prepare
        self.chat = prepare(args)()

    def handle(self, line: str) -> bool:
        """Does what the line says. Returns False if that is to leave."""
        word, _, rest = line.strip().partition(" ")
        if not rest and word in SAME:
            word = SAME[word]
        elif not (line.startswith("/") and COMMAND.fullmatch(word)):
            self.chat.answer(line)
            return True
        if word == "/exit":
            return False
        try:
            self._do(word, rest.strip())
        except OutcoreError as e:
            self.chat.say(f"{word}: {e}", WARN)
        return True

    def _do(self, word: str, rest: str) -> None:
        if word in NEEDED and not rest:
            raise UsageError(f"give a {NEEDED[word]}")
        if word in ("/save", "/load", "/resume", "/model") and not self.chat.agreement.alone:
            raise UsageError("does not work over several machines")
        do: dict[str, Callable[[str], object]] = {
            "/help": lambda _: self.chat.say(f"{HELP} {PIPED if TYPED_ELSEWHERE in os.environ else TYPED}"),
            "/clear": lambda _: self._clear(),
            "/resume": lambda _: self.chat.kept.resume_last(),
            "/image": lambda file: self.add_images([file]),
            "/save": lambda file: self.chat.kept.save(Path(file)),
            "/load": lambda file: self.chat.kept.load(Path(file)),
            "/set": self._set,
            "/system": self._system,
            "/model": self._model,
        }
        if word not in do:
            raise UsageError(f"no such command{meant(word, [*do, *SAME, '/exit'])}; /help lists them")
        do[word](rest)

    def close(self) -> None:
        if hasattr(self, "chat"):  # not if two models in a row could not be opened
            self.chat.kept.leave()
            self.chat.session.close()

    def add_images(self, names: Sequence[str]) -> None:
        """Gives the next message images, after those that it has. Raises ``UsageError`` if one cannot be read."""
        named = [*(self.chat.pictures.names if self.chat.pictures else ()), *names]
        self.chat.pictures = open_images(self._args, model_folder(self._args), named)
        self.chat.say(f"for the next message: {counted(len(named), 'image')}")

    def _clear(self) -> None:
        self.chat.pictures = None
        self.chat.retell(self.chat.template, [])
        self.chat.kept.begin()
        self.chat.say("conversation reset")

    def _set(self, rest: str) -> None:
        name, _, given = rest.removeprefix("--").replace("=", " ").partition(" ")
        attribute, name = name.replace("-", "_"), name.replace("_", "-")
        if name not in ("", *SETTABLE):
            raise UsageError(f"{name}: choose from {', '.join(SETTABLE)}{meant(name, SETTABLE)}")
        if not given.strip():
            shown = [each for each in SETTABLE if name in ("", each)]
            self.chat.say("\n".join(f"{each} {getattr(self._args, each.replace('-', '_'))}" for each in shown))
            return
        value = getattr(parser_of("chat").parse_args([f"--{name}={given.strip()}"]), attribute)
        changed = Namespace(**vars(self._args) | {attribute: value})
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
        turns, path, typed = kept.turns, kept.path, kept.typed
        self.close()
        # All of it must be freed before the other is read.
        del self.chat, kept
        gc.collect()
        clear_cache()
        why = ""
        try:
            self.chat, self._args = load(), args
        except (OutcoreError, KeyboardInterrupt) as e:
            why = str(e) or "interrupted"
        if why:  # and what was begun of the other is freed
            self.chat = again()
            self.chat.say(f"/model: {why}", WARN)
        self.chat.turns = records
        self.chat.kept.path, self.chat.kept.typed = path, typed
        self.chat.kept.begin()
        self.chat.retell(self.chat.template, turns)
        self.chat.greet()
