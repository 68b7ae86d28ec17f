"""``outcore chat`` over several turns: the same tokens as the whole conversation computed anew, and nothing twice."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

import zoo
from interrupts import heard
from outcore.cli import answers
from outcore.cli import chat as chat_module
from outcore.cli import terminal as terminal_module
from outcore.cli.answers import KeptChat
from outcore.cli.chat import session_file, shared_lines
from outcore.cli.commands import TYPED_ELSEWHERE
from outcore.cli.console import BrokenLines
from outcore.cli.engine import interruptible
from outcore.cli.main import main
from outcore.decode import prefix_cache, text_drafts
from outcore.decode.conversation import ChatTemplate
from outcore.decode.preparation import prepare
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.engine.transport import Agreement
from outcore.errors import BudgetError, CheckpointError, UsageError
from outcore.machine.cache_folder import cache_dir
from outcore.plan.planner import smallest_budget
from outcore_kv.scratch import Scratch
from outcore_prefix import prefix_cache as prompts

END = 2  # <|im_end|>
MESSAGES = ["import os", "self.a = a; self.b = b", "import re"]
STREAMED = ["--memory", "300MB", "--resident", "1", "--context", "256", "--draft", "none"]


def chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, lines: list[str], *args: str
) -> tuple[dict[str, Any], str, str]:
    """What the command prints to these lines: the JSON, the answers, and standard error, which holds them too."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    status = main(["chat", "--model", str(folder), "--json", *args])
    out, err = capsys.readouterr()
    assert status == 0, err
    record = json.loads(out)
    answers = "".join(f"{turn['text']}\n" for turn in record["turns"])
    return record, answers.removesuffix("\n"), err


@pytest.fixture(scope="module")
def conversing(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A copy of a model with a chat template."""

    @cache
    def made(model: Path) -> Path:
        folder = tmp_path_factory.mktemp("chat") / "model"
        shutil.copytree(model, folder)
        shutil.copy(demo_model / "chat_template.jinja", folder)
        return folder

    return made


@pytest.fixture(scope="module")
def quick(quick_models: Callable[..., Path], conversing: Callable[..., Path]) -> Path:
    """A model that says something in a moment, not that it made sense: a recurrent layer and one with attention."""
    return conversing(quick_models(2))


@pytest.fixture(scope="module")
def plain_caches(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose caches mlx-lm makes, which --max-kv-size bounds."""
    folder = tmp_path_factory.mktemp("chat") / "qwen3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, "qwen3", zoo.CONFIGS["qwen3"] | {"vocab_size": 8192})
        zoo.save_checkpoint("qwen3", folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_model / name, folder)
    return folder


@pytest.fixture(scope="module")
def ending(quick_models: Callable[..., Path], conversing: Callable[..., Path]) -> Path:
    """A model that is likely to say <|im_end|>, which ends an answer."""
    folder = conversing(quick_models(3))
    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    (embedding,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    weights[embedding][END] *= 3.4
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [0, END]}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> TokenizerWrapper:
    return mlx_lm.utils.load_tokenizer(demo_model, eos_token_ids=[0, END])


@pytest.mark.parametrize(("resident", "draft"), [("1", "ngram"), ("3", "none")])
def test_three_turns_equal_the_whole_conversation_computed_anew(
    resident: str, draft: str, tokenizer: Any, ending: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda most, *_: DraftLengthPolicy(min(most, 6), fixed=True))
    options = [*STREAMED, "--resident", resident, "--draft", draft, "-m", "6"]
    record, out, _ = chat(capsys, monkeypatch, ending, MESSAGES, *options)
    streamed = resident == "1"
    model, _ = mlx_lm.load(str(ending))
    text: list[int] = []
    for message, turn in zip(MESSAGES, record["turns"], strict=True):
        before = len(text)
        # An answer that ended itself is not ended again.
        between = "" if not text else "\n" if text[-1] == END else "<|im_end|>\n"
        text += tokenizer.encode(f"{between}<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n")
        # Nothing twice: the message, and of the answer before what was in no cache, its last token.
        assert turn["prompt_tokens"] == len(text) - before + (before > 0)
        assert turn["tokens"] == anew(model, text, 6)
        assert turn["text"] in out
        text += turn["tokens"]
    assert {t["finish_reason"] for t in record["turns"][:2]} == {"length", "stop"}
    assert record["context_tokens"] == len(text)
    assert record["tokens"] == [t for turn in record["turns"] for t in turn["tokens"]]
    assert record["sweeps"] == sum(t["sweeps"] for t in record["turns"])
    assert (record["streamed_units"] > 0) == streamed
    if streamed:
        assert len(record["tokens"]) == record["sweeps"] + record["accepted_tokens"]
        assert (record["drafted_tokens"] > 0) == (draft == "ngram")


def anew(model: Any, text: list[int], most: int) -> list[int]:
    """mlx-lm's answer to a whole conversation, nothing of which was computed before."""
    found: list[int] = []
    for token, _ in generate_step(mx.array(text), model, max_tokens=most):
        found.append(int(token))
        if token in (0, END):
            break
    return found


def tight(folder: Path, context: int, **options: Any) -> list[str]:
    """The least memory for a context of so many tokens."""
    with pytest.raises(BudgetError) as refused:
        prepare(folder, memory=1_000_000, context=context, prompt=context, resumable=True, **options)
    return ["--memory", f"{refused.value.smallest}B", "--context", str(context), "--draft", "none"]


def test_a_full_conversation_tells_one_number_and_has_used_the_room_of_longer_messages(
    quick: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Memory for a message of 32 tokens is memory for more of the conversation, when it comes to that."""
    size = prepare(quick, memory="1GB", context=32, prompt=32, resumable=True, kv_disk="off").profile.size
    least = ["--memory", f"{smallest_budget(size)}B", "--context", "32", "--draft", "none", "--kv-disk", "off"]
    gc.collect()
    others = mx.get_active_memory()
    gc.disable()  # what waits for the collector is held: 53 tokens' states when a refused plan was in a cycle
    try:
        record, _, err = chat(capsys, monkeypatch, quick, ["hi"] * 2, "-m", "400", *least)
    finally:
        gc.enable()
    (ended,) = re.findall(r"was cut off at the (\d+) tokens that fit in memory", err)
    refused = re.findall(r"an answer exceed the (\d+) tokens that fit in memory", err)
    assert refused and set(refused) == {ended}
    assert record["context_tokens"] == int(ended) > 32
    assert record["peak_memory_bytes"] - others <= record["budget_bytes"]


def test_commands_and_a_context_that_is_full(quick: Path, capsys: Any, monkeypatch: Any) -> None:
    lines = ["hi", "x = 1 " * 400, "x = 1 " * 1500, "more", "", "h", "r", "hi", "q", "never read"]
    record, _, err = chat(capsys, monkeypatch, quick, lines, "-m", "3", *tight(quick, 64))
    assert [t["message"] for t in record["turns"]] == ["hi", "more", "hi"]
    first, second, third = record["turns"]
    assert first["tokens"] == third["tokens"] and first["prompt_tokens"] == third["prompt_tokens"]
    assert second["prompt_tokens"] < 20, "what was refused left the caches as they were"
    assert err.count("no room") == 2 and err.count("/clear begins a new one") == 2
    assert err.count("tokens that fit in memory") == 2 and "4096" not in err
    assert "q, exit, quit, Ctrl-D: leave" in err and "conversation reset" in err and "MB budget" in err


def test_an_answer_is_cut_where_the_context_ends(quick: Path, capsys: Any, monkeypatch: Any) -> None:
    record, _, err = chat(capsys, monkeypatch, quick, ["class A:"], "-m", "4000", *tight(quick, 20))
    # 20 with room for as long a message, which this one is not.
    assert 20 <= record["context_tokens"] < 40 and record["turns"][0]["finish_reason"] == "length"
    assert f"was cut off at the {record['context_tokens']} tokens that fit in memory" in err


def test_a_disk_that_is_full_ends_an_answer_and_not_the_conversation(
    plain_caches: Path, tokenizer: TokenizerWrapper, capsys: Any, monkeypatch: Any
) -> None:
    real, left = Scratch.write, [1]  # two layers keep theirs on disk: one writes its block, the next cannot

    def write(self: Scratch, offset: int, data: memoryview) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise self._failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), len(data))
        real(self, offset, data)

    lines = ["x = 1 " * 60, "more", "and more"]
    flags = [*tight(plain_caches, 320, kv_disk="on"), "--kv-disk", "on", "-m", "12"]
    monkeypatch.setattr(Scratch, "write", write)
    record, _, err = chat(capsys, monkeypatch, plain_caches, lines, *flags)
    assert left[0] < -1 and err.count("No space left") == 1 and "the answer so far stays" in err
    ended, *after = record["turns"]
    assert 0 < len(ended["tokens"]) < 12 and [len(t["tokens"]) for t in after] == [12, 12]
    model, _ = mlx_lm.load(str(plain_caches))
    text: list[int] = []
    for message, turn in zip(lines, record["turns"], strict=True):
        between = "<|im_end|>\n" if text else ""
        text += tokenizer.encode(f"{between}<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n")
        said = [int(t) for t, _ in generate_step(mx.array(text), model, max_tokens=len(turn["tokens"]))]
        assert turn["tokens"] == said
        text += said


def test_a_prompt_that_was_broken_off_is_no_part_of_the_conversation(
    quick: Path, capsys: Any, monkeypatch: Any
) -> None:
    messages: list[str] = []

    @contextmanager
    def interrupt_the_second() -> Iterator[Callable[[], bool]]:
        messages.append("")
        yield lambda: len(messages) == 2

    options = ["-m", "3", *STREAMED]
    whole, _, _ = chat(capsys, monkeypatch, quick, ["def f(x):", "def g(x):"], *options)
    monkeypatch.setattr(answers, "interruptible", interrupt_the_second)
    record, _, err = chat(capsys, monkeypatch, quick, ["def f(x):", "no", "def g(x):"], *options)
    assert err.count("the message was dropped") == 1
    assert record["tokens"] == whole["tokens"] and record["context_tokens"] == whole["context_tokens"]
    # Half a sweep leaves the caches as they were before it.
    assert record["turns"][1]["prompt_tokens"] == whole["turns"][1]["prompt_tokens"]


def test_the_prompts_of_a_template(tokenizer: TokenizerWrapper) -> None:
    template = ChatTemplate(tokenizer, "be brief")
    opening = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(template.opening("hi")) == opening
    after = "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(template.following("hi", 261)) == f"<|im_end|>{after}"
    # An answer that closed itself is not closed again; another token that ends it stands where it was said.
    assert tokenizer.decode(template.following("hi", 2)) == after
    assert tokenizer.decode(template.following("hi", 0)) == f"<|im_end|>{after}"


def test_templates_that_cannot_be_used(tokenizer: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}[{{ messages[0].content }}]"
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", alone)
    template = ChatTemplate(tokenizer)
    assert template.following("hi", 261) == template.opening("hi"), "each message by itself, as in mlx-lm"
    with pytest.raises(UsageError, match="one message"):
        ChatTemplate(tokenizer, "be brief")
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", "{{ raise_exception('never') }}")
    with pytest.raises(CheckpointError, match="never"):
        ChatTemplate(tokenizer)
    without: Any = SimpleNamespace(has_chat_template=False)
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatTemplate(without)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-m", "0"], "give at least 1, or -1"),
        (["--chat-template-config", "{"], "not JSON"),
        (["--chat-template-config", "[]"], "JSON object"),
    ],
)
def test_bad_arguments_give_one_line(quick: Path, capsys: Any, args: list[str], says: str) -> None:
    assert main(["chat", "--model", str(quick), *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


class Terminal:
    """``outcore chat`` in a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self.master, slave = pty.openpty()
        with heard():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "outcore", "chat", *args],
                stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "160", "PROMPT_TOOLKIT_NO_CPR": "1"},
            )  # fmt: skip
        os.close(slave)
        self.shown = self.before = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self.master, 4096):
                self.shown += data.decode(errors="replace")
        except OSError:
            return

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str) -> None:
        """Until this is shown beyond what was waited for before."""
        until = time.monotonic() + 30
        while text not in self.shown:
            assert time.monotonic() < until and self.process.poll() is None, self.shown
            time.sleep(0.02)
        self.before, _, self.shown = self.shown.partition(text)

    def end(self) -> int:
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()
            self._reader.join()
            os.close(self.master)


def test_where_ctrl_c_is_ignored_an_answer_does_not_listen_for_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as asked:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not asked()
    finally:
        signal.signal(signal.SIGINT, before)


PASTE = "\x1b[200~{}\x1b[201~"
ANSWERING = "\x1b[?2004l"


@pytest.fixture
def typing(quick: Path) -> Iterator[Callable[..., Terminal]]:
    """Chats in terminals, with a model that answers at once."""
    begun: list[Terminal] = []

    def begin(*args: str) -> Terminal:
        begun.append(Terminal("--model", str(quick), "--memory", "500MB", "--context", "256", "--json", *args))
        begun[-1].wait_for("Ctrl-C stops")
        begun[-1].wait_for(">")
        return begun[-1]

    yield begin
    for terminal in begun:
        terminal.process.kill()
        terminal.process.wait()


def test_lines_are_pasted_continued_typed_during_an_answer_and_kept_for_the_next_run(
    typing: Any, tmp_path: Path
) -> None:
    """And Ctrl-C stops an answer, at the prompt it ends the chat, and the terminal is left as it was."""
    history = cache_dir() / "chat-history"
    history.parent.mkdir(parents=True, exist_ok=True)
    history.write_text("\n# the run before\n+before\n\n# the run before\n+/bye\n")
    terminal = typing("-m", "240")
    terminal.type("\x1b[A\x1b[A\r")  # up, beyond /bye
    for number in range(2):
        terminal.wait_for(ANSWERING)
        if not number:
            # The next message, which is not shown in the answer.
            terminal.type("typed\x08\x08\x08\x08\x08" + PASTE.format("first line\nsecond line") + "\r")
        # The prompt's own handler of the signal is gone when the answer's progress is shown.
        while termios.tcgetattr(terminal.master)[3] & termios.ECHO or len(terminal.shown) < 40:
            assert terminal.process.poll() is None, terminal.shown
            time.sleep(0.01)
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("stopped")
        assert "first line" not in terminal.before and "typed" not in terminal.before
    terminal.wait_for(">")
    terminal.type("/set max-tokens 2\r")
    terminal.wait_for("max-tokens 2")
    # Pasted lines are one message, and a message can have several lines.
    for text in (PASTE.format("def f(x):\n    return x") + "\r", "a\\\rb\r", "c\x1b\rd\r", "one\r"):
        terminal.type(text)
        terminal.wait_for("in the conversation")
    assert history.stat().st_mode & 0o777 == 0o600, "nobody else may read it"
    assert history.read_text().endswith("+one\n")
    terminal.wait_for(">")
    terminal.type(f"/save {tmp_path / 'c.json'}\r")
    terminal.wait_for("6 turns")
    terminal.wait_for(">")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("Ctrl-C again, Ctrl-D or /exit leaves")
    terminal.wait_for(">")
    terminal.process.send_signal(signal.SIGINT)
    fd = os.dup(terminal.master)
    assert terminal.end() == 130
    after = termios.tcgetattr(fd)
    os.close(fd)
    assert after[3] & termios.ECHO and after[3] & termios.ICANON and after[0] & termios.ICRNL
    turns = json.loads((tmp_path / "c.json").read_text())["turns"]
    pasted = ["def f(x):\n    return x", "a\nb", "c\nd", "one"]
    assert [turn["message"] for turn in turns] == ["before", "first line\nsecond line", *pasted]
    assert main(["cache", "clear", "--yes"]) == 0 and history.exists()


def test_ctrl_c_clears_a_line_and_leaves_only_from_an_empty_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = iter(["x", "", "x", "hi", "", "x", "", ""])  # what stands there; Ctrl-C is pressed at all but hi

    class Session:
        def __init__(self, **_: Any) -> None:
            self.default_buffer = SimpleNamespace(text="")

        def prompt(self, _: str) -> str:
            self.default_buffer.text = next(begun)
            if self.default_buffer.text == "hi":
                return "hi"
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal_module, "PromptSession", Session)
    monkeypatch.setattr(terminal_module, "_no_echo", nullcontext)
    messages = terminal_module.typed(on_error=False)
    assert next(messages) == "hi"
    with pytest.raises(KeyboardInterrupt):
        next(messages)
    assert [*begun] == [] and capsys.readouterr().err.count("/exit leaves") == 3


def test_ctrl_c_right_after_a_message_stops_its_answer_and_not_the_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of lines that were typed at a launcher's terminal; those of a pipe nobody has in his hand."""
    given = iter(["", "hi\n", "", "/set temp 1\n", "", ""])  # Ctrl-C is pressed where there is nothing

    def readline(_: int) -> str:
        if line := next(given):
            return line
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=readline, isatty=lambda: False))
    monkeypatch.setenv(TYPED_ELSEWHERE, "1")
    with heard():
        handler = signal.getsignal(signal.SIGINT)
        messages = shared_lines(Agreement())
        assert next(messages) == "hi"
        signal.raise_signal(signal.SIGINT)
        with interruptible() as pressed:
            assert pressed()
        assert next(messages) == "/set temp 1" and signal.getsignal(signal.SIGINT) is handler
        with pytest.raises(KeyboardInterrupt):
            next(messages)
    assert [*given] == [] and capsys.readouterr().err.count("/exit leaves") == 3
    given = iter([""])
    monkeypatch.delenv(TYPED_ELSEWHERE)
    with pytest.raises(KeyboardInterrupt):
        next(shared_lines(Agreement()))


class Spoken:
    """What ``Chat`` does with lines and commands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: Any, folder: Path) -> None:
        self.given, self.capsys = (monkeypatch, folder), capsys

    def __call__(self, lines: list[str], *args: str) -> tuple[dict[str, Any], str]:
        monkeypatch, folder = self.given
        record, _, err = chat(self.capsys, monkeypatch, folder, lines, *args)
        return record, err


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch, capsys: Any, quick: Path) -> Spoken:
    return Spoken(monkeypatch, capsys, quick)


def test_a_conversation_that_was_loaded_goes_on_as_if_it_had_never_been_left(spoken: Spoken, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    options = ["-m", "4", *STREAMED, "--temp", "1", "--seed", "7"]
    whole, _ = spoken(["def f(x):", "def g(x):", f"/save {file}", "class A:"], *options)
    assert file.stat().st_mode & 0o777 == 0o600 and [p.name for p in tmp_path.glob("*c.json*")] == ["c.json"]
    again, err = spoken(["something else", f"/load {file}", "class A:", f"/save {file}"], *options)
    assert f"{file}: 2 turns" in err and f"{file}: 3 turns" in err
    assert again["turns"][-1]["tokens"] == whole["turns"][-1]["tokens"]
    assert again["context_tokens"] == whole["context_tokens"]
    turns = json.loads(file.read_text())["turns"]
    assert [t["message"] for t in turns] == ["def f(x):", "def g(x):", "class A:"]
    assert [t["answer"] for t in turns] == [t["text"] for t in whole["turns"]]


def test_what_is_no_conversation_is_neither_loaded_nor_written_over(spoken: Spoken, tmp_path: Path) -> None:
    good, own = tmp_path / "good.json", tmp_path / "own.json"
    own.write_text('{"mine": 1}')
    _, err = spoken(["hi", f"/save {good}", f"/save {own}", f"/save {tmp_path}/no/x"], "-m", "2", *STREAMED)
    assert own.read_text() == '{"mine": 1}' and "not a saved conversation" in err and "No such file" in err
    document = json.loads(good.read_text())
    changes: list[Any] = [
        document | {"tokens": [10**6]}, document | {"tokens": [-1]}, document | {"text": "other"},
        document | {"turns": [{"message": 1}]}, document | {"schema": 2}, [], "x",
    ]  # fmt: skip
    lines = [f"/load {tmp_path / 'none'}", "/load", f"/load {own}"]
    for n, change in enumerate(changes):
        (tmp_path / f"{n}.json").write_text(json.dumps(change))
        lines.append(f"/load {tmp_path / f'{n}.json'}")
    record, err = spoken(["hi", *lines, "/what is this", " /etc/hosts"], "-m", "2", *STREAMED)
    assert err.count("no conversation that outcore chat saved") == 6
    assert err.count("tokens are not this model's") == 2
    assert "give a file" in err and "No such file" in err and "no such command" in err
    assert [t["message"] for t in record["turns"]] == ["hi", " /etc/hosts"]


def test_commands_with_a_slash_are_commands_in_a_pipe_too(
    quick: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    file = tmp_path / "kept.json"
    lines = ["/help", "hi", f"/save {file}", " /bye now", "/bye", "no"]
    record, _, err = chat(capsys, monkeypatch, quick, lines, "-m", "2", *STREAMED)
    assert [t["message"] for t in record["turns"]] == ["hi", " /bye now"] and file.exists()
    # Both say all there is.
    _, _, short = chat(capsys, monkeypatch, quick, ["h"], *STREAMED)
    for said in (err, short):
        assert all(word in said for word in ("/quit, /bye, q", "/save FILE", "/set NAME", "/resume", "Esc Enter"))


def test_settings_change_between_answers(spoken: Spoken, quick: Path) -> None:
    """The answers are those of the flags; what cannot be set is told with what is nearest, and changes nothing."""
    given = ["--temp", "1", "--top-k", "5", "--seed", "7", "-m", "4"]
    wanted, _ = spoken(["hi"], *STREAMED, *given)
    lines = [
        "/set temp 1",
        "/set top-k=5",
        "/set seed 7",
        "/set max_tokens 4",
        "/set temp",
        "hi",
        "/?",
        "/set",
        "exit",
        "no",
    ]
    got, err = spoken(lines, *STREAMED, "-m", "9")
    assert got["tokens"] == wanted["tokens"] and len(got["tokens"]) == 4
    assert "temp 1.0\ntop-k 5\nseed 7\nmax-tokens 4\ntemp 1.0\n" in err and "\n/exit  " in err
    assert "temp 1.0\ntop-p 1.0\ntop-k 5\nmin-p 0.0\nmax-tokens 4\nseed 7\n" in err and got["turns"][1:] == []
    bad = [
        "/set temp x",
        "/set temp -1",
        "/set top-k 2.5",
        "/set max-tokens 0",
        "/set seed -1",
        "/set tmp 1",
        "/sytem x",
    ]
    got, err = spoken([*bad, "hi"], *STREAMED, *given)
    assert got["tokens"] == wanted["tokens"]
    told = ["--temp: invalid float", "--temp -1.0: ", "--top-k: invalid int", "--max-tokens 0: ", "--seed -1: "]
    assert all(f"/set: {each}" in err for each in told), err
    assert "(did you mean temp?)" in err and "(did you mean /system?)" in err


def test_a_system_prompt_is_changed_under_a_conversation(spoken: Spoken, tokenizer: TokenizerWrapper) -> None:
    wanted, _ = spoken(["hi"], "-m", "3", *STREAMED, "--system-prompt", "Be kind")
    got, err = spoken(["/system Be kind", "hi", "/system", "more"], "-m", "3", *STREAMED)
    assert got["turns"][0]["tokens"] == wanted["tokens"]
    assert "system prompt set" in err and "system prompt removed; the next answer computes" in err
    # The whole conversation, without a system prompt.
    parts = [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        got["turns"][0]["text"],
        "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert got["turns"][1]["prompt_tokens"] == sum(len(tokenizer.encode(part)) for part in parts)


class Keyboard(io.StringIO):
    """Standard input that says it is a terminal's."""

    def isatty(self) -> bool:
        return True


def test_the_last_typed_conversation_is_kept_and_resumed(
    quick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*lines: str, typed: bool = True) -> tuple[list[dict[str, Any]], str]:
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", (Keyboard if typed else io.StringIO)(text))
        assert main(["chat", "--model", str(quick), "--json", "-m", "2", *STREAMED]) == 0
        out, err = capsys.readouterr()
        return json.loads(out)["turns"], err

    whole, err = run("one", "two", "three")
    assert "/resume continues" not in err and "/help lists" in err
    (file,) = (cache_dir() / "sessions").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    run("piped", typed=False)
    run("one", "two")
    again, err = run("something else", "/resume", "three")
    assert "/resume continues" in err and "last conversation: 2 turns" in err and "its last message: two" in err
    assert again[-1]["tokens"] == whole[-1]["tokens"]
    _, err = run("new", "/clear", "/resume", "/resume")
    said = [line for line in err.splitlines() if "last conversation:" in line]
    assert "1 turn," in said[0] and "3 turns," in said[1], "what was cleared, then the one before it"
    (file.parent / f"{file.stem.rpartition('+')[0]}+9.json").write_text("{")  # the newest, and damaged
    _, err = run("/resume", "four")
    assert "not resumed: " in err and "last conversation: 3 turns" in err
    files = sorted(file.parent.glob("last+*.json"))
    assert main(["cache", "ls"]) == 0 and f"sessions-{files[0].stem}" in capsys.readouterr().out
    monkeypatch.setattr("outcore.cli.answers.KEPT", 3)
    run("one more")
    files = sorted(file.parent.glob("last+*.json"))
    assert len(files) == 3
    for each in files:
        each.unlink()
    assert "/resume: no conversation with this model was kept" in run("/resume", typed=False)[1]


def test_another_model_takes_over_the_conversation_within_the_same_budget(
    quick: Path, plain_caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["-m", "3", "--memory", "60MB", "--context", "256", "--draft", "none"]
    record, _, err = chat(
        capsys,
        monkeypatch,
        quick,
        ["hi", "/model nowhere/at-all", "/model ./none", f"/model {plain_caches}", "more"],
        *options,
    )
    assert "/model: " in err and [t["message"] for t in record["turns"]] == ["hi", "more"]
    assert record["budget_bytes"] == 60_000_000 and record["streamed_units"] + record["resident_units"] == 4
    assert record["turns"][1]["prompt_tokens"] > 20, "the conversation before, too"
    assert record["peak_memory_bytes"] <= record["budget_bytes"]


def test_a_model_that_cannot_be_opened_leaves_the_first_one_with_what_was_said(
    quick: Path, plain_caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was gone in the meantime: two models would not be within the budget."""
    original, before = chat_module._load, list[Any]()

    def load(folder: Path, *args: Any) -> Any:
        assert all(model() is None for model in before)
        if folder == plain_caches:
            raise BudgetError("too small")
        model = original(folder, *args)
        before.append(weakref.ref(model))
        return model

    monkeypatch.setattr(chat_module, "_load", load)
    lines = ["hi", f"/model {plain_caches}", "more"]
    record, _, err = chat(capsys, monkeypatch, quick, lines, "-m", "3", *STREAMED)
    assert "/model: too small" in err and len(record["turns"]) == len(before) == 2
    assert record["turns"][1]["prompt_tokens"] > 20


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three four", "one two t\x1b[1D\x1b[K\nthree fou\x1b[3D\x1b[K\nfour"),
        ("a bb cc ddddd eeeeee", "a bb cc d\x1b[1D\x1b[K\nddddd eee\x1b[3D\x1b[K\neeeeee"),
        ("abcdefghijklmnop", "abcdefghi\njklmnop"),
        ("一二三四五六", "一二三四\n五六"),
        ("if a:\n    b = c", "if a:\n    b = c"),
        ("\tab", "\ta\x1b[1D\x1b[K\nab"),
    ],
)
def test_lines_of_an_answer_break_between_words(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = os.terminal_size((10, 24))
    monkeypatch.setattr(os, "get_terminal_size", lambda _: size)
    monkeypatch.setenv("TERM", "xterm")
    lines = BrokenLines()
    assert "".join(lines.broken(text[n : n + 2]) for n in range(0, len(text), 2)) == shown
    monkeypatch.setenv("TERM", "dumb")
    assert BrokenLines().broken(text) == text


# Sessions


def session_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str
) -> tuple[list[list[int]], str]:
    """The tokens of each answer of a run of a session, and what it told."""
    record, _, err = chat(capsys, monkeypatch, folder, list(lines), "--session", "work", "-m", "5", *STREAMED)
    return [turn["tokens"] for turn in record["turns"]], err


@pytest.mark.parametrize("lost", [None, "damaged"])
def test_a_session_goes_on_after_a_restart(
    quick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lost: str | None
) -> None:
    """As if it had never ended, computing what is new alone; where what was computed is lost, all of it."""
    record, _, _ = chat(capsys, monkeypatch, quick, MESSAGES, "-m", "5", *STREAMED)
    whole = [turn["tokens"] for turn in record["turns"]]
    first, err = session_of(capsys, monkeypatch, quick, *MESSAGES[:2])
    assert "computed first" not in err
    (kept,) = cache_dir().glob("prefix/*/*.conversation")
    if lost == "damaged":
        data = bytearray(kept.read_bytes())
        data[len(data) // 2] ^= 4
        kept.write_bytes(data)
    second, err = session_of(capsys, monkeypatch, quick, MESSAGES[2])
    assert [*first, *second] == whole
    assert ("its cache was loaded too" in err) == (lost is None)
    assert ("computes them first" in err) == (lost is not None)
    (now,) = cache_dir().glob("prefix/*/*.conversation")
    assert now != kept, "one file a conversation"


@pytest.mark.parametrize(("before", "after"), [("16", "16"), ("16", "64"), (None, "16")])
def test_a_session_has_the_window_that_it_is_resumed_with(
    before: str | None, after: str, plain_caches: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """What was kept of another window is computed anew, as where nothing was kept."""

    def run(folder: str, window: str | None, prefix: str, *lines: str) -> tuple[list[int], str]:
        monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / folder))
        flags = ["--memory", "60MB", "--context", "256", "-m", "6", "--session", "work", "--prefix-cache", prefix]
        flags += ["--max-kv-size", window] if window else []
        record, _, err = chat(capsys, monkeypatch, plain_caches, list(lines), *flags)
        return record["turns"][-1]["tokens"], err

    run("kept", before, "on", MESSAGES[1])
    answer, err = run("kept", after, "on", MESSAGES[2])
    if before == after:
        expected, _ = run("unbroken", before, "on", *MESSAGES[1:])
    else:
        run("anew", before, "off", MESSAGES[1])
        expected, _ = run("anew", after, "off", MESSAGES[2])
    assert answer == expected
    assert ("its cache was loaded too" in err) == (before == after)


def test_a_session_that_is_killed_has_its_last_answer(
    quick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(KeptChat, "leave", lambda _: None)
        session_of(capsys, monkeypatch, quick, MESSAGES[0])
    said = json.loads((cache_dir() / "sessions" / "work.json").read_text())
    assert [turn["message"] for turn in said["turns"]] == MESSAGES[:1]
    tokens, err = session_of(capsys, monkeypatch, quick, MESSAGES[1])
    assert "1 turn," in err and len(tokens) == 1


def test_a_session_is_one_processs_and_one_models(
    quick: Path, plain_caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session_of(capsys, monkeypatch, quick, MESSAGES[0])
    with session_file("work"):
        assert main(["chat", "--model", str(quick), "--session", "work", *STREAMED]) != 0
        assert "in use by another process" in capsys.readouterr().err
    for name in ("", "../x", "a/b", ".x", "x" * 65, "a b"):
        with pytest.raises(UsageError, match="--session"), session_file(name):
            pass
    (cache_dir() / "sessions" / "work.json").write_text('{"format": "else"}')
    assert main(["chat", "--model", str(quick), "--session", "work", *STREAMED]) != 0
    assert "no conversation that outcore chat saved" in capsys.readouterr().err
    (cache_dir() / "sessions" / "work.json").unlink()
    session_of(capsys, monkeypatch, quick, MESSAGES[0])
    tokens, err = session_of(capsys, monkeypatch, plain_caches, MESSAGES[1])
    # The same tokens in another model: computed anew.
    assert "computes them first" in err and len(tokens) == 1


def test_a_session_keeps_nothing_wrong_after_an_answer_broke_off(
    quick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C in the middle of an answer: what the caches hold of it is not the conversation's."""
    session_of(capsys, monkeypatch, quick, MESSAGES[0])
    expected, _ = session_of(capsys, monkeypatch, quick, "what")
    shutil.rmtree(cache_dir())
    session_of(capsys, monkeypatch, quick, MESSAGES[0])
    original = answers.stream_generate

    def dies(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for n, response in enumerate(original(*args, **kwargs)):
            yield response
            if n == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(answers, "stream_generate", dies)
        patch.setattr(sys, "stdin", io.StringIO("something else\n"))
        flags = ["--session", "work", "-m", "5", *STREAMED]
        assert main(["chat", "--model", str(quick), "--json", *flags]) != 0
    capsys.readouterr()
    got, _ = session_of(capsys, monkeypatch, quick, "what")
    assert got == expected


def test_what_was_found_of_a_message_is_shown(quick: Path, capsys: Any, monkeypatch: Any) -> None:
    for module in (prompts, prefix_cache):
        monkeypatch.setattr(module, "GRID", 16)
    monkeypatch.setattr(prompts, "STATE_SHARE", 1e6)  # recurrent states are larger than what is kept of few tokens
    seen = []
    for _ in range(2):
        record, _, err = chat(capsys, monkeypatch, quick, ["x = 1 " * 10], "--memory", "1GB", "-m", "3")
        (turn,) = record["turns"]
        seen.append((turn["cached_tokens"], turn["tokens"]))
        assert ("found on disk" in err) == (turn["cached_tokens"] > 0)
    assert seen[0][0] == 0 < seen[1][0] and seen[0][1] == seen[1][1]


def test_a_session_says_what_it_was_begun_with(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--session", "work", "--memory", "1GB", "-m", "3")
    other = shutil.copytree(quick, tmp_path / "other")
    errs = [
        chat(capsys, monkeypatch, folder, ["hi"], *flags, *more)[2]
        for folder, more in ((quick, ("--system-prompt", "Be kind")), (quick, ("--system-prompt", "Be")), (other, ()))
    ]
    assert ["--system-prompt ignored" in e for e in errs] == [False, True, False]
    assert ["another model" in e for e in errs] == [False, False, True]


def test_the_summary_counts_what_mlx_kept_of_freed_memory(
    quick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the budget does, and not only what it keeps at the end."""
    held, original = list[int](), mx.clear_cache

    def clear_cache() -> None:
        held.append(mx.get_active_memory() + mx.get_cache_memory())
        original()

    gc.collect()  # models of other tests
    mx.clear_cache()
    monkeypatch.setattr(mx, "clear_cache", clear_cache)
    words = ["--memory", "60MB", "--prefill-step-size", "16", "-m", "2", "--prefix-cache", "off"]
    record, _, _ = chat(capsys, monkeypatch, quick, ["import os " * 80], *words)
    assert mx.get_peak_memory() < max(held), "or nothing is seen here"
    assert max(held) <= record["peak_memory_bytes"] <= record["budget_bytes"]
