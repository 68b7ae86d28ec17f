"""``outcore launch -- serve``: clients get one machine's answers from several, and none of them harms another."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from memory_link import memory_links
from outcore.cli import serve
from outcore.cli.commands import parser_of
from outcore.errors import UsageError
from outcore.serve.app import all_apis, application
from outcore.serve.site import Site
from outcore_cluster.group import RankGroup
from outcore_cluster.launch.as_rank import leave_out

FLAGS = ["--memory", "30MB", "--resident", "0", "--port", "0", "--drain", "60"]
LAUNCH = ["launch", "--hosts", "local,local", "--"]


@contextmanager
def serving(*before: str, model: Path, more: tuple[str, ...] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and its address."""
    command = [sys.executable, "-m", "outcore", *before, "serve", str(model), *FLAGS, *more]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None, line + process.stderr.read()
        yield process, found[0]
    finally:
        processes = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
        for each in processes:
            with suppress(psutil.Error):
                each.kill()
        process.communicate()


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The processes of ranks."""
    below = psutil.Process(launcher.pid).children(recursive=True)
    return {int(p.environ()["MLX_RANK"]): p for p in below if "serve" in p.cmdline() and "MLX_RANK" in p.environ()}


def completion(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


ASKS: list[dict[str, Any]] = [
    completion("def read_lines(path):", 6),
    completion("import os\n", 5),
    completion("class Point:", 5, temperature=0.9, seed=3, n=2),
    completion("for i in range(10):", 4, temperature=1.0, seed=5, top_p=0.9),
    completion("The answer is", 4, repetition_penalty=1.3),
    completion("def add(a, b):\n    return a + b\n\n" , 10),
    completion("x = ", 3, logprobs=2),
    {"messages": [{"role": "user", "content": "a list"}], "max_tokens": 6, "temperature": 0, "response_format": {
        "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array", "items": {"type": "integer"}}}
    }},
]  # fmt: skip


async def ask(http: httpx.AsyncClient, body: Mapping[str, Any]) -> Any:
    path = "chat/completions" if "messages" in body else "completions"
    answer = (await http.post(f"/v1/{path}", json=dict(body))).raise_for_status().json()
    return [{k: v for k, v in choice.items() if k != "index"} for choice in answer["choices"]]


def asked(where: str | Site, bodies: list[dict[str, Any]], together: bool) -> list[Any]:
    """The choices of each answer; asked at once, or one after the other."""
    transport = None if isinstance(where, str) else httpx.ASGITransport(application(where))
    address = where if isinstance(where, str) else "http://127.0.0.1"

    async def run() -> list[Any]:
        async with httpx.AsyncClient(transport=transport, base_url=address, timeout=100, trust_env=False) as http:
            if together:
                return await asyncio.gather(*(ask(http, body) for body in bodies))
            return [await ask(http, body) for body in bodies]

    return asyncio.run(run())


def sweeps(address: str) -> int:
    text = httpx.get(f"{address}/metrics", trust_env=False).text
    found = re.search(r"^outcore_sweeps_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


@pytest.fixture(scope="module")
def spoken(quick_models: Callable[[int], Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four random layers and a chat template: what it says is not looked at."""
    folder = tmp_path_factory.mktemp("ranks") / "spoken"
    shutil.copytree(quick_models(4), folder)
    for name in ("chat_template.jinja", "tokenizer_config.json"):  # with a token that ends what a schema describes
        shutil.copy(demo_model / name, folder)
    return folder


@pytest.fixture(scope="module")
def expected(spoken: Path) -> list[Any]:
    """One machine's answers."""
    args = parser_of("serve").parse_args([str(spoken), *FLAGS])
    args.ranks = None
    with closing(serve.open_service(args, serve.names_of(args))) as service:
        return asked(Site(service, all_apis()), ASKS, together=True)


Served = tuple[subprocess.Popen[str], dict[int, psutil.Process], str]


@pytest.fixture(scope="module")
def two(spoken: Path) -> Iterator[Served]:
    """A launcher, its two ranks, and the first one's address. Whoever is stuck for longer than nobody asks for anything
    ends them."""
    launch = [*LAUNCH[:-1], "--env", "OUTCORE_LINK_STALL_S=3", "--"]
    with serving(*launch, model=spoken) as (launcher, address):
        yield launcher, ranks_of(launcher), address


def test_eight_clients_at_once_get_one_machines_answers(two: Served, expected: list[Any]) -> None:
    _, ranks, address = two
    assert len(ranks) == 2
    before = sweeps(address)
    assert asked(address, ASKS, together=True) == expected
    assert 10 <= sweeps(address) - before < 30, "48 tokens"
    # Alone they have drafts, and the same texts.
    assert asked(address, ASKS[:3], together=False) == expected[:3]
    end, spent, took = time.monotonic() + 60, 1.0, 1.0
    while spent >= 0.05 * took:  # what answers leave to be done, is done some time
        began, busy = time.monotonic(), [sum(p.cpu_times()[:2]) for p in ranks.values()]
        assert began < end, f"{spent} processor seconds in {took} of ranks that nobody asks"
        time.sleep(2)
        spent = max(sum(p.cpu_times()[:2]) - b for p, b in zip(ranks.values(), busy, strict=True))
        took = time.monotonic() - began
    assert asked(address, ASKS[:1], together=True) == expected[:1]


def test_what_one_client_does_wrong_is_no_other_ones_harm(two: Served, spoken: Path, expected: list[Any]) -> None:
    _, _, address = two
    with httpx.Client(base_url=address, timeout=60, trust_env=False) as http:
        # One that leaves in the middle of its answer, and others beside it.
        for others in (ASKS[:3], []):
            with http.stream("POST", "/v1/completions", json=completion("def f(", 3000, stream=True)) as stream:
                next(stream.iter_text())
                assert asked(address, others, together=True) == expected[: len(others)]
        bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nonsense"}}}
        assert http.post("/v1/chat/completions", json=ASKS[7] | {"response_format": bad}).status_code == 400
        unload = http.post("/api/generate", json={"model": spoken.name, "keep_alive": 0})
        assert unload.status_code == 400 and "several machines share it" in unload.text
        # It stays loaded, whatever a request says.
        body = {"model": spoken.name, "prompt": "import os\n", "keep_alive": 0, "options": {"num_predict": 2}}
        assert http.post("/api/generate", json=body).status_code == 200
        assert asked(address, ASKS[:3], together=True) == expected[:3]


def test_a_rank_that_is_lost_ends_all(two: Served) -> None:
    """The last one of those that have ``two``."""
    launcher, ranks, address = two
    body = completion("def f(", 3000, stream=True)
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60, trust_env=False) as stream:
        texts = stream.iter_text()
        next(texts)
        ranks[1].kill()
        assert "a machine that shares the model has failed" in "".join(texts)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and "rank 1 (local)" in errors and "Traceback" not in errors
    assert not any(p.is_running() for p in ranks.values())


def test_an_answer_under_way_ends_well_before_all_do(spoken: Path) -> None:
    """At SIGTERM; that Ctrl-C ends all ranks, with 130, is test_launch_models.py's."""
    with serving(*LAUNCH, model=spoken) as (launcher, address):
        ranks = ranks_of(launcher)
        body = completion("def read_lines(path):", 120, stream=True)
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60, trust_env=False) as stream:
            texts = stream.iter_text()
            first = next(texts)
            launcher.send_signal(signal.SIGTERM)
            told = first + "".join(texts)
        _, errors = launcher.communicate(timeout=60)
    assert told.rstrip().endswith("data: [DONE]")
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]][-1] == "length"
    assert launcher.returncode == 0 and "Stopping within " in errors and "1 request still running" in errors
    assert errors.startswith("2 machines share the layers")
    assert not any(p.is_running() for p in ranks.values())


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--model", "another"], "one model over several machines"),
        (["--prefix-cache", "1GB"], "prefix_cache: does not work over several machines"),
    ],
)
def test_what_is_not_shared_is_refused(more: list[str], why: str) -> None:
    args = parser_of("serve").parse_args(["--model", "m", *more])
    args.ranks = RankGroup(memory_links(2)[0])
    with pytest.raises(UsageError, match=why):
        assert args.ranks.serves(args, [*args.model])
        args.ranks.options(serve.service_options(args).load)


def test_without_flags_everything_optional_is_off() -> None:
    args = parser_of("serve").parse_args(["--model", "m"])
    args.ranks = RankGroup(memory_links(2)[0])
    leave_out(args)
    load = args.ranks.options(serve.service_options(args).load)
    assert (load.prefix_cache, load.draft) == ("off", "auto")
