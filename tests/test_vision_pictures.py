"""A tiny model of mlx-vlm's with pictures from the command line, from a chat and from a server's APIs."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_vlm", reason="the extra vision is not installed")

import vision_families
from outcore.cli.main import main
from outcore.errors import RequestError, UsageError
from outcore.options import LoadOptions
from outcore.serve import requests
from outcore.serve.api import HttpRequest, ParsedRequest
from outcore.serve.app import OPENAI
from outcore.serve.events import Begun, TextPart
from outcore.serve.service import ModelService, ServiceOptions
from outcore.serve.shelf import Shelf
from outcore_apis.apis import OLLAMA
from outcore_vision.parts import CommandImages

ASK, TOKENS = "What is it?", 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = vision_families.save_model("qwen2_5_vl", tmp_path_factory.mktemp("pictures") / "qwen")
    config = json.loads((folder / "config.json").read_text())
    # mlx-lm knows the type, too.
    (folder / "config.json").write_text(json.dumps(config | {"outcore_model_types": "vision"}))
    for n, image in enumerate(vision_families.pictures(2)):
        image.save(folder.parent / f"{n}.png")
    return folder


def told(capsys: pytest.CaptureFixture[str], *words: str, failed: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    flags = ["--max-tokens", str(TOKENS), "--memory", "8MB"]
    flags += [] if words[0] == "batch" else ["--draft", "none", "--prefix-cache", "off"]
    assert main([*words, *flags, "--json"]) == failed
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def service(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelService]:
    monkeypatch.setattr(requests, "OPAQUE", {})
    load = LoadOptions(memory="8MB", prefix_cache="off", draft="none", govern=False, context=256)
    made = ModelService(Shelf([str(model)]), ServiceOptions(load))
    try:
        yield made
    finally:
        made.close()


async def answered(service: ModelService, parsed: Any) -> tuple[str, int]:
    """The answer's text, and how many tokens its prompt had."""
    assert isinstance(parsed, ParsedRequest)
    text, tokens = "", 0
    async with aclosing(service.answer(replace(parsed.requests[0], max_tokens=TOKENS))) as events:
        async for event in events:
            text += event.text if isinstance(event, TextPart) else ""
            tokens = event.prompt_tokens if isinstance(event, Begun) else tokens
    return text, tokens


def parsed(service: ModelService, api: Any, path: str, body: dict[str, Any]) -> Any:
    (route,) = (route for route in api.routes if route.path == path)
    return route.handle(HttpRequest(service, body))


def test_pictures_reach_the_model_by_every_way_alike(
    model: Path, service: ModelService, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (str(model.parent / f"{n}.png") for n in range(2))
    plain = told(capsys, "generate", "--model", str(model), "--prompt", ASK)
    one = told(capsys, "generate", "--model", str(model), "--prompt", ASK, "--image", first)
    other = told(capsys, "generate", "--model", str(model), "--prompt", ASK, "--image", second)
    both = told(capsys, "generate", "--model", str(model), "--prompt", ASK, "--image", first, "--image", second)
    assert plain["prompt_tokens"] < one["prompt_tokens"] < both["prompt_tokens"]
    assert one["tokens"] != plain["tokens"] and one["tokens"] != other["tokens"] != both["tokens"]

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{ASK}\n/image {second}\n{ASK}\n"))
    chat = told(capsys, "chat", "--model", str(model), "--image", first)
    assert chat["turns"][0]["tokens"] == one["tokens"] and len(chat["turns"]) == 2

    # A message that fails keeps its images.
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'x ' * 40_000}\n{ASK}\n"))
    (turn,) = told(capsys, "chat", "--model", str(model), "--image", first)["turns"]
    assert turn["tokens"] == one["tokens"]

    uris = [base64.b64encode(Path(name).read_bytes()).decode() for name in (first, second)]
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{uri}"}} for uri in uris]

    def line(n: int, *content: Any) -> str:
        body = {"messages": [{"role": "user", "content": [*content, {"type": "text", "text": ASK}]}]}
        url = "/v1/chat/completions"
        return json.dumps({"custom_id": str(n), "method": "POST", "url": url, "body": body})

    asking, answers = model.parent / "lines.jsonl", model.parent / "answers.jsonl"
    bad = {"type": "image_url", "image_url": {"url": "https://a.example/a.png"}}
    asking.write_text("\n".join([line(0, parts[0]), line(1, *parts), line(2), line(3, bad)]))
    told(capsys, "batch", "--model", str(model), "--input", str(asking), "--output", str(answers), failed=1)
    said = {found["custom_id"]: found for found in map(json.loads, answers.read_text().splitlines())}
    bodies = [said[str(n)]["response"]["body"] for n in range(3)]
    texts = [(body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]) for body in bodies]
    assert texts == [(found["text"], found["prompt_tokens"]) for found in (one, both, plain)]
    assert "fetches no addresses" in said["3"]["error"]["message"]

    def chatted(*content: Any) -> Any:
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": ASK}]}]
        return parsed(service, OPENAI, "/v1/chat/completions", {"messages": messages})

    def asked(api: Any, path: str, **body: Any) -> Any:
        return parsed(service, api, path, body)

    async def run() -> None:
        said = [{"role": "user", "content": ASK, "images": uris[:1]}]
        answers = await asyncio.gather(
            answered(service, chatted(parts[0])),
            answered(service, chatted(*parts)),
            answered(service, chatted()),
            answered(service, asked(OLLAMA, "/api/chat", messages=said)),
        )
        assert answers == [(found["text"], found["prompt_tokens"]) for found in (one, both, plain, one)]
        with pytest.raises(RequestError, match="SVG is not read") as failed:
            await answered(service, chatted({"type": "image_url", "image_url": "data:;base64,PHN2Zy8+"}))
        assert failed.value.param == "messages[0].content[0].image_url"

    asyncio.run(run())
    (card,) = service.models()
    assert card.images == {"pixels": 1 << 22, "bytes": 24_000_000, "count": 64}
    (listed,) = parsed(service, OPENAI, "/v1/models", {})["data"]
    assert listed["input_modalities"] == ["text", "image"] and listed["images"] == card.images
    shown = parsed(service, OLLAMA, "/api/show", {"model": card.name})
    assert shown["capabilities"] == ["completion", "vision", "tools"]


def test_a_model_of_text_takes_none(
    demo_model: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = str(model.parent / "0.png")
    assert main(["generate", "--model", str(demo_model), "--prompt", "x", "--image", image]) == 2
    assert "this model reads text only" in capsys.readouterr().err
    assert main(["generate", "--model", str(model), "--prompt", "x", "--image", "https://a.example/a.png"]) == 2
    assert "--allow-remote-images" in capsys.readouterr().err
    # A type of both libraries is mlx-lm's in a chat that begins without images.
    both = model.parent / "both"
    both.mkdir(exist_ok=True)
    for file in model.iterdir():
        (both / file.name).write_bytes(file.read_bytes())
    config = json.loads((both / "config.json").read_text())
    del config["outcore_model_types"]
    (both / "config.json").write_text(json.dumps(config))
    given = Namespace(image=None, ranks=None, allow_remote_images=False)
    with pytest.raises(UsageError, match="begun without images"):
        CommandImages(given, both, [image])
    assert CommandImages(Namespace(**vars(given) | {"image": [image]}), both, [image]).sizes
    assert CommandImages(given, model, [image]).sizes
    assert Shelf([str(demo_model)]).default.card.images == {}
