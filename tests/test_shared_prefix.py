"""What many conversations begin with, a system prompt, is computed once, also where states are kept at few places."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import chat_tokenizers
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.cli import serve
from outcore.cli.commands import parser_of
from outcore.decode.conversation import ChatTemplate, Conversation
from outcore.errors import UsageError
from outcore.serve import prompting
from outcore.serve.events import Finished, GenerationRequest
from outcore.serve.prompting import Prompter
from outcore_prefix import prefix_cache as prompts
from test_chat import chat
from test_prefix import BLOCK, TEXT, answer, opened, same, small_blocks
from test_service import heard, serving, text_of

assert small_blocks  # of 8 tokens, here too

SYSTEM = "You write Python. Answer with a function, and say nothing about it. "
TOOL = {"type": "function", "function": {"name": "look_up", "description": "finds a word in a list"}}


@pytest.fixture
def tokenizer(spoken_to: Path) -> TokenizerWrapper:
    return load_tokenizer(spoken_to)


@pytest.fixture(autouse=True)
def small_blocks_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompting, "GRID", BLOCK)


@pytest.fixture(scope="module")
def spoken_to(quick_models: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model of two layers with a chat template that has a place for system messages and tools."""
    folder = tmp_path_factory.mktemp("shared") / "model"
    shutil.copytree(quick_models(2), folder)
    (folder / "chat_template.jinja").write_text(chat_tokenizers.HERMES)
    return folder


def stored(model: Any) -> set[str]:
    return {path.suffix for path in model.outcore.prefix.blocks.folder.iterdir()}


@pytest.fixture
def model(spoken_to: Path) -> Iterator[Any]:
    model = opened(spoken_to, resident=1)
    with model.outcore:
        yield model


def test_another_text_begins_behind_the_last_block_of_what_is_shared(
    model: Any, spoken_to: Path, tokenizer: Any
) -> None:
    """20 tokens are shared: 2 blocks. Where nobody says so none is found."""
    first, second = TEXT[:20] + TEXT[200:210], TEXT[:20] + TEXT[300:310]
    plain = opened(spoken_to, "off", resident=1)
    with plain.outcore:
        expected = [answer(plain, tokenizer, ids, 3) for ids in (first, second)]
    assert answer(model, tokenizer, TEXT[:20] + TEXT[100:110], 1)[2] == 0
    got = [answer(model, tokenizer, ids, 3, shared_prefix=20) for ids in (first, second)]
    assert all(map(same, got, expected)) and [g[2] for g in got] == [0, 16]


def test_what_is_shared_comes_before_the_prompts_end_and_is_written_once(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room for one state beside a prompt's keys and values."""
    answer(model, tokenizer, TEXT[:30], 1, shared_prefix=20)
    folder = model.outcore.prefix.blocks.folder
    size = {suffix: sum(p.stat().st_size for p in folder.glob(f"*{suffix}")) for suffix in (".kv", ".state")}
    assert len(list(folder.glob("*.state"))) == 2
    shutil.rmtree(folder)
    # Of one state and a half.
    monkeypatch.setattr(prompts, "STATE_SHARE", 0.75 * size[".state"] / (size[".kv"] * 30 / 24))
    answer(model, tokenizer, TEXT[:30], 1, shared_prefix=20)
    assert stored(model) == {".kv", ".state"} and len(list(folder.glob("*.state"))) == 1
    again = [answer(model, tokenizer, TEXT[:30], 1, shared_prefix=20)[2] for _ in range(2)]
    assert again == [16, 30] and len(list(folder.glob("*.state"))) == 1


def test_other_numbers_of_shared_tokens_are_refused(model: Any, tokenizer: Any) -> None:
    for wrong in (-1, 1.5, "x", True):
        with pytest.raises(UsageError, match="shared_prefix"):
            answer(model, tokenizer, TEXT[:20], shared_prefix=wrong)


def test_a_servers_conversations_share_their_system_prompt(spoken_to: Path) -> None:
    def asks() -> list[GenerationRequest]:
        system = {"role": "system", "content": SYSTEM}
        return [
            GenerationRequest(messages=(system, {"role": "user", "content": question}), max_tokens=3, tools=(TOOL,))
            for question in ("Sort a list of names. ", "Find the longest word. ")
        ]

    def run(prefix_cache: str) -> list[tuple[str, int]]:
        with serving(spoken_to, memory="60MB", prefix_cache=prefix_cache) as service:
            found = []
            for ask in asks():
                events = asyncio.run(heard(service, ask))
                (finished,) = [e for e in events if isinstance(e, Finished)]
                found.append((text_of(events), finished.cached_tokens))
            return found

    prompter = Prompter(load_tokenizer(spoken_to))
    first, second = (prompter.prepare(ask) for ask in asks())
    assert first.shared == second.shared > 2 * BLOCK and first.tokens[: first.shared] == second.tokens[: first.shared]
    cold, warm = run("off"), run("on")
    assert [text for text, _ in warm] == [text for text, _ in cold]
    assert [found for _, found in warm] == [0, first.shared // BLOCK * BLOCK]


def test_another_chat_with_the_same_system_prompt_finds_it(
    spoken_to: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--memory", "60MB", "--context", "400", "-m", "3", "--system-prompt", SYSTEM]
    questions = ["Sort a list of names by their length", "Which word is the longest one"]

    def run(*more: str) -> list[tuple[list[int], int]]:
        records = [chat(capsys, monkeypatch, spoken_to, [q], *flags, *more)[0]["turns"][0] for q in questions]
        return [(record["tokens"], record["cached_tokens"]) for record in records]

    cold, warm = run("--prefix-cache", "off", "--prefill-step-size", str(BLOCK)), run()
    assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
    template = ChatTemplate(load_tokenizer(spoken_to), SYSTEM)
    shared = template.shared(template.opening("Sort"))
    assert [found for _, found in warm] == [0, shared // BLOCK * BLOCK] and shared > 2 * BLOCK


def test_a_conversation_knows_what_others_begin_with(spoken_to: Path) -> None:
    tokenizer = load_tokenizer(spoken_to)
    template = ChatTemplate(tokenizer, SYSTEM)
    conversation = Conversation(template, list)
    first, other = (conversation.prompt(message) for message in ("Sort names", "Which is longest"))
    shared = conversation.shared(first)
    assert first[:shared] == other[:shared] and first[shared] != other[shared]
    assert SYSTEM.strip() in tokenizer.decode(first[:shared])
    conversation.add(first, [5, 6], len(first) + 1)
    assert conversation.shared(conversation.prompt("And now?")) == 0, "a cache holds it"


@pytest.mark.parametrize("name", ["HERMES", "STRICT", "HEADERS", "HARMONY"])
def test_every_template_shows_what_conversations_share(name: str, demo_model: Path, tmp_path: Path) -> None:
    """Or nothing, where it refuses. The rest of a conversation does not matter."""
    marks = ("[TOOL_CALLS]", "[ARGS]") if name == "HEADERS" else ()
    tokenizer = chat_tokenizers.chat_tokenizer(demo_model, tmp_path / name, getattr(chat_tokenizers, name), marks)
    prompter = Prompter(tokenizer)
    system = () if name == "STRICT" else ({"role": "system", "content": SYSTEM},)
    begun = (*system, {"role": "user", "content": "Sort a list of names, the shortest ones first, and print them all"})
    other = (*system, {"role": "user", "content": "What is the longest word?"})
    later = (*begun, {"role": "assistant", "content": "a.sort()"}, {"role": "user", "content": "And backwards?"})
    prompts_ = [prompter.prepare(GenerationRequest(messages=m)) for m in (begun, later, other)]
    shared = next(n for n, (a, b) in enumerate(zip(prompts_[1].tokens, prompts_[2].tokens, strict=False)) if a != b)
    assert abs(prompts_[0].shared - shared) <= 1 and prompts_[0].shared == prompts_[1].shared
    assert (shared > 2 * BLOCK) == bool(system)


def test_keys_of_servers_keep_prompts_apart(spoken_to: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody finds, or times, what was asked of a server with another key, or by chat; the key itself lies nowhere."""
    ask = GenerationRequest(messages=({"role": "user", "content": SYSTEM},), max_tokens=2)

    def found(key: str | None, how: Callable[[str | None], argparse.Namespace]) -> int:
        args = how(key)
        with closing(serve.open_service(args, serve.names_of(args))) as service:
            events = asyncio.run(heard(service, ask))  # type: ignore[arg-type]
        (finished,) = [e for e in events if isinstance(e, Finished)]
        return finished.cached_tokens

    def file(key: str | None) -> argparse.Namespace:
        given = []
        if key is not None:
            given = ["--api-key-file", str(tmp_path / "key")]
            (tmp_path / "key").write_text(key)
            (tmp_path / "key").chmod(0o600)
        line = [str(spoken_to), "--memory", "60MB", "--context", "400", *given]
        args: argparse.Namespace = parser_of("serve").parse_args(line)
        return args

    def variable(key: str | None) -> argparse.Namespace:
        monkeypatch.setenv("OUTCORE_API_KEY", key or "")
        return file(None)

    counts = [found("secret-of-one", file), found("secret-of-two", file), found(None, file)]
    assert counts == [0, 0, 0]
    whole = found("secret-of-one", file)
    assert whole > 2 * BLOCK and found("secret-of-two", variable) == found(None, file) == whole
    folder = Path(os.environ["OUTCORE_CACHE"])
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".end" for path in files)
    assert not any(b"secret-of" in path.read_bytes() or "secret-of" in str(path) for path in files)
