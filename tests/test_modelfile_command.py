"""``--modelfile``: what generate and chat make of one, and which of several says goes."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import GenerationResponse
from mlx_lm.sample_utils import make_logits_processors

from outcore.cli import serve
from outcore.cli.commands import parser_of
from outcore.cli.engine import AnswerOutput
from outcore.cli.main import main
from outcore.decode.conversation import Conversation
from outcore.errors import UsageError
from outcore.serve.events import GenerationRequest, Sampling, TextPart
from outcore_compat.modelfile.preset import Prefaced, settle

TURN = """{%- for m in messages -%}{{ ("# " if m.role == "system" else "") ~ m.content ~ "\\n" }}{%- endfor -%}"""
PROMPT = "def read_lines(path):"

Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def quick(quick_models: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "quick"
    shutil.copytree(quick_models(2), folder)
    (folder / "chat_template.jinja").write_text(TURN)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    """Writes a Modelfile of these lines."""

    def write(*lines: str) -> str:
        path = tmp_path / "Modelfile"
        path.write_text("\n".join(lines))
        return str(path)

    return write


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command's status, its JSON, and standard error."""

    def command(*args: str, lines: tuple[str, ...] = ()) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main([*args, "--json"])
        out, err = capsys.readouterr()
        return status, json.loads(out), err

    return command


def settled(command: str, *words: str) -> tuple[argparse.Namespace, dict[str, Any]]:
    parser = parser_of(command)
    args = parser.parse_args(words)
    return args, settle(parser, args)


def test_what_is_said_becomes_flags_that_were_not_given(file: Callable[..., str]) -> None:
    path = file("FROM owner/name", "SYSTEM be brief", "DRAFT owner/small",
                *(f"PARAMETER {p}" for p in ("num_ctx 99", "num_predict 7", "temperature 0.5", "top_k 4", "top_p 0.5",
                  "min_p 0.1", "seed 3", "draft_num_predict 2")))  # fmt: skip
    for command in ("generate", "chat"):
        args, filled = settled(command, "--modelfile", path)
        assert (args.model, args.system_prompt, args.draft) == ("owner/name", "be brief", "owner/small")
        assert (args.max_tokens, args.temp, args.top_k, args.top_p, args.min_p, args.seed) == (7, 0.5, 4, 0.5, 0.1, 3)
        assert args.num_draft_tokens == 2
        assert getattr(args, "context", None) == (99 if command == "chat" else None)
        assert filled["draft"].source == f"{path}: line 3"


def test_flags_go_before_a_modelfile(file: Callable[..., str]) -> None:
    path = file("FROM owner/name", "SYSTEM be brief", "DRAFT owner/small",
                "PARAMETER num_predict 7", "PARAMETER temperature 0.5", "PARAMETER draft_num_predict 2")  # fmt: skip
    words = ["other", "--system-prompt", "", "--draft-model", "mine", "--memory", "1GB", "-m", "100", "--temp", "0.0"]
    args, filled = settled("generate", "--modelfile", path, *words, "--num-draft", "5")
    assert (args.model, args.system_prompt, args.draft) == ("other", "", "mine")
    assert (args.memory, args.max_tokens, args.temp, args.num_draft_tokens) == ("1GB", 100, 0.0, 5)
    assert filled == {}


def test_no_drafts_and_a_seed_of_no_ones_choosing(file: Callable[..., str]) -> None:
    path = file("FROM a", "DRAFT b", "PARAMETER draft_num_predict 0", "PARAMETER seed -1")
    seeds = {settled("chat", "--modelfile", path)[0].seed for _ in range(3)}
    assert len(seeds) > 1 and min(seeds) >= 0
    assert settled("chat", "--modelfile", path)[0].draft == "none"
    assert settled("chat", "--modelfile", path, "--draft", "ngram")[0].draft == "ngram"


def test_a_modelfile_goes_before_what_is_settled(
    file: Callable[..., str], run: Run, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTCORE_MODEL", "owner/other")
    path = file(f"FROM {quick}", "PARAMETER num_predict 1")
    status, record, err = run("generate", "--modelfile", path, "-p", "hi", "--memory", "1GB")
    assert status == 0 and record["generation_tokens"] == 1, err


def test_generate_renders_what_the_modelfile_says(file: Callable[..., str], run: Run, quick: Path) -> None:
    path = file(f"FROM {quick}", "SYSTEM read", "MESSAGE user import os", "MESSAGE assistant import sys",
                "PARAMETER num_predict 4")  # fmt: skip
    status, record, err = run("generate", "--modelfile", path, "-p", PROMPT, "--memory", "300MB", "--resident", "1")
    assert status == 0, err
    assert (record["budget_bytes"], record["generation_tokens"]) == (300_000_000, 4) and record["streamed_units"] == 1
    written = f"# read\nimport os\nimport sys\n{PROMPT}\n"
    _, same, err = run("generate", str(quick), "-p", written, "--ignore-chat-template", "-m", "4")
    assert record["tokens"] == same["tokens"]
    assert record["prompt_tokens"] == same["prompt_tokens"]


def test_stop_strings_context_and_penalties(file: Callable[..., str], run: Run, quick: Path) -> None:
    model, tokenizer = mlx_lm.load(str(quick))
    penalties = make_logits_processors(None, repetition_penalty=0.3, repetition_context_size=64)
    plain = mlx_lm.generate(model, tokenizer, f"{PROMPT}\n", max_tokens=8, logits_processors=penalties)
    assert plain != mlx_lm.generate(model, tokenizer, f"{PROMPT}\n", max_tokens=8)
    del model
    head = (f"FROM {quick}", "PARAMETER repeat_penalty 0.3", "PARAMETER num_predict 8")
    _, whole, err = run("generate", "--modelfile", file(*head), "-p", PROMPT, "--draft", "none")
    assert whole["text"] == plain, err
    at = len(plain) // 2
    stop = plain[at : at + 3]
    _, record, _ = run("generate", "--modelfile", file(*head, f'PARAMETER stop """{stop}"""'), "-p", PROMPT)
    assert (record["text"], record["finish_reason"]) == (plain[: plain.index(stop)], "stop")
    prompt = whole["prompt_tokens"]
    path = file(*head, f"PARAMETER num_ctx {prompt + 3}")
    assert run("generate", "--modelfile", path, "-p", PROMPT)[1]["tokens"] == whole["tokens"][:3]
    status, record, _ = run("generate", "--modelfile", file(*head, f"PARAMETER num_ctx {prompt}"), "-p", PROMPT)
    assert status == 2 and f"Modelfile: line 4: num_ctx {prompt} leaves no room" in record["error"]


def test_chat_goes_on_after_a_stop_string_as_if_the_rest_had_not_been_said(
    file: Callable[..., str], run: Run, quick: Path
) -> None:
    head = (f"FROM {quick}", "SYSTEM read", "MESSAGE user import os", "MESSAGE assistant import sys",
            "PARAMETER num_predict 8", "PARAMETER num_ctx 256", "PARAMETER repeat_penalty 0.3")  # fmt: skip
    _, record, err = run("chat", "--modelfile", file(*head), lines=(PROMPT,))
    text = record["turns"][0]["text"]
    assert record["turns"][0]["prompt_tokens"] and len(text.strip()) > 10, err
    stop = text.strip()[5:10]
    path = file(*head, f'PARAMETER stop """{stop}"""')
    _, record, err = run("chat", "--modelfile", path, lines=(PROMPT, "import re", PROMPT))
    first, second, third = record["turns"]
    assert (first["text"], first["finish_reason"]) == (text[: text.index(stop)], "stop"), err
    model, tokenizer = mlx_lm.load(str(quick))
    said = (f"# read\nimport os\nimport sys\n{PROMPT}\n", first["text"], "\nimport re\n")
    ids = [token for part in said for token in tokenizer.encode(part, add_special_tokens=False)]
    # Penalties look at what was said before, too.
    penalties = make_logits_processors(None, repetition_penalty=0.3, repetition_context_size=64)
    anew = mlx_lm.generate(model, tokenizer, ids, max_tokens=8, logits_processors=penalties)
    assert second["text"] == anew != mlx_lm.generate(model, tokenizer, ids, max_tokens=8) and stop not in anew
    ids += [*second["tokens"], *tokenizer.encode(f"\n{PROMPT}\n", add_special_tokens=False)]
    assert third["prompt_tokens"] < len(ids) / 2
    anew = mlx_lm.generate(model, tokenizer, ids, max_tokens=8, logits_processors=penalties)
    assert third["text"] == anew.partition(stop)[0]


def test_serve_answers_as_the_modelfile_says(file: Callable[..., str], quick: Path) -> None:
    path = file(f"FROM {quick}", "SYSTEM read", "MESSAGE user import os", "MESSAGE assistant import sys",
                "PARAMETER num_predict 8", "PARAMETER temperature 0.5", "PARAMETER seed 3", "PARAMETER num_ctx 128",
                "PARAMETER repeat_penalty 1.1", 'PARAMETER stop """never said"""')  # fmt: skip
    args, _ = settled("serve", "--modelfile", path, "--memory", "0.5GB")
    assert (serve.names_of(args), args.context, args.memory) == ([str(quick)], 128, "0.5GB")
    defaults = serve.defaults_of(args)
    assert defaults.max_tokens == 8
    assert defaults.sampling == Sampling(temperature=0.5, seed=3, repetition_penalty=1.1, repetition_context_size=64)
    user = {"role": "user", "content": PROMPT}
    asks = (
        GenerationRequest(messages=(user,), sampling=defaults.sampling, max_tokens=8),
        GenerationRequest(
            prompt=f"# read\nimport os\nimport sys\n{PROMPT}\n", sampling=defaults.sampling, max_tokens=8
        ),
        GenerationRequest(messages=({"role": "system", "content": "mine"}, user)),
    )

    async def heard(service: Any, ask: GenerationRequest) -> str:
        return "".join([e.text async for e in service.answer(ask) if isinstance(e, TextPart)])

    with closing(serve.open_service(args, serve.names_of(args))) as service:
        said = args.preset.service(service)
        first, second = (asyncio.run(heard(said, ask)) for ask in asks[:2])
        assert first == second != ""
        assert asyncio.run(said.prompt(asks[0])).tokens == asyncio.run(service.prompt(asks[1])).tokens
        assert said.card("").template == said.models()[0].template != ""
    assert isinstance(said, Prefaced)
    assert said.prefaced(asks[0]).stop == ("never said",)
    assert said.prefaced(GenerationRequest(stop=("mine",))).stop == ("mine",)
    asked = said.prefaced(asks[2]).messages
    assert asked is not None and [m["content"] for m in asked] == ["mine", "import os", "import sys", PROMPT]


def test_serve_takes_a_modelfile_of_one_model(file: Callable[..., str], quick: Path) -> None:
    path = file("FROM owner/name", "PARAMETER top_k 5")
    args, _ = settled("serve", "--modelfile", path, str(quick), "--top-k", "0")
    assert (serve.names_of(args), args.top_k) == ([str(quick)], 0)
    args, _ = settled("serve", "--modelfile", path, str(quick), "--model", "other")
    several = SimpleNamespace(models=lambda: [None, None])
    with pytest.raises(UsageError, match="Modelfile: a Modelfile is for one model"):
        args.preset.service(several)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("FROM ./model.gguf", "--model is from {path}: line 2"),
        ("FROM llama3.2:3b", "--model is from {path}: line 2"),
        ("FROM {model}\nPARAMETER top_k 9999999", "--top-k is from {path}: line 3"),
        ("FROM {model}\nSYSTEM be brief", "{path}: line 3: this model has no chat template"),
        ("FROM {model}\nBAD x", "{path}: line 3: unknown instruction BAD"),
    ],
)
def test_what_goes_wrong_names_the_line(
    file: Callable[..., str], run: Run, quick: Path, line: str, told: str, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(quick, bare, ignore=shutil.ignore_patterns("chat_template*"))
    path = file("# a Modelfile", *line.format(model=bare).split("\n"))
    status, record, err = run("generate", "--modelfile", path, "-p", "hi")
    assert status in (1, 2)
    assert told.format(path=path) in record["error"]
    assert err.count("\n") == 1


def test_what_stands_in_a_prompt_cache_is_not_said_again(
    file: Callable[..., str], run: Run, quick: Path, tmp_path: Path
) -> None:
    cache = str(tmp_path / "cache.safetensors")
    run("cache-prompt", str(quick), "--prompt", "import os", "--prompt-cache-file", cache)
    path = file(f"FROM {quick}", "SYSTEM be brief")
    status, record, _ = run("generate", "--modelfile", path, "-p", "hi", "--prompt-cache-file", cache)
    assert status == 2 and "line 2: --prompt-cache-file already contains the text before" in record["error"]


def answered(*pieces: str) -> Any:
    for n, text in enumerate(pieces, 1):
        yield GenerationResponse(
            text, n, mx.zeros(1), False, 1, 0.0, n, 0.0, 0.0, "length" if n == len(pieces) else None
        )


@pytest.mark.parametrize(
    ("stops", "pieces", "finish"),
    [
        (["cd"], ["a", "b"], "stop"),
        (["x"], ["a", "bc", "de"], "length"),
        (["ex"], ["a", "bc", "de"], "length"),
        (["dx", "ef"], ["a", "bc", "de"], "length"),
        (["bcde"], ["a", "", ""], "stop"),
        (["bcdx"], ["a", "", "bcde"], "length"),
        (["e", "cd"], ["a", "b"], "stop"),
        (["a"], [""], "stop"),
        ([], ["a", "bc", "de"], "length"),
    ],
)
def test_text_is_held_back_while_a_stop_string_may_begin(stops: list[str], pieces: list[str], finish: str) -> None:
    found = list(AnswerOutput().shown(answered("a", "bc", "de"), stops, lambda: None))
    assert found[-1].finish_reason == finish
    text = "abcde"
    ends = [text.index(s) for s in stops if s in text]
    assert "".join(r.text for r in found) == text[: min(ends, default=None)] == "".join(pieces)
    assert [r.token for r in found] == [1, 2, 3][: len(found)]


class Spelled:
    """A template whose tokens are the characters."""

    def opening(self, message: str, encode: object = None) -> list[int]:
        return [ord(c) for c in f"<{message}>"]

    def following(self, message: str, last: int, encode: object = None) -> list[int]:
        return [ord(c) for c in f"/<{message}>"]

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]


class Cache:
    """Of so many tokens, which can be taken back or not."""

    def __init__(self, trimmable: bool) -> None:
        self.trimmable, self.size = trimmable, 0

    def is_trimmable(self) -> bool:
        return self.trimmable

    def trim(self, n: int) -> int:
        self.size -= n
        return n


@pytest.mark.parametrize("trimmable", [True, False])
def test_caches_give_back_what_was_not_said(trimmable: bool) -> None:
    conversation = Conversation(Spelled(), lambda: [Cache(trimmable)])  # type: ignore[arg-type]
    prompt = conversation.prompt("a")
    conversation.add(prompt, [ord(c) for c in "yes, no"], 9)
    conversation.cache[0].size = 9
    conversation.end_answer("yes")
    assert "".join(map(chr, conversation.text)) == "<a>yes"
    assert conversation.held == conversation.cache[0].size == (6 if trimmable else 0)
    rest = "".join(map(chr, conversation.prompt("b")))
    assert rest == ("/<b>" if trimmable else "<a>yes/<b>")
    conversation.add(conversation.prompt("b"), [ord("x")], 4)
    conversation.end_answer("x")
    assert "".join(map(chr, conversation.text)) == "<a>yes/<b>x"
