"""llama.cpp's own addresses, asked by an HTTP client in this process of a tiny model."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from outcore.options import LoadOptions
from outcore.serve.app import all_apis, application
from outcore.serve.service import ModelService, ServiceOptions
from outcore.serve.shelf import Shelf
from outcore.serve.site import Site

SAY = [{"role": "user", "content": "hi"}]


def test_llamas_addresses(quick_models: Callable[..., Path], demo_model: Path, tmp_path: Path) -> None:
    async def test(service: ModelService) -> None:
        transport = httpx.ASGITransport(application(Site(service, all_apis())))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

            async def post(path: str, status: int = 200, **body: Any) -> Any:
                answer = await client.post(path, json=body)
                assert answer.status_code == status, answer.text
                return answer.json()

            tokens = (await post("/tokenize", content="I believe"))["tokens"]
            assert await post("/detokenize", tokens=[*tokens[:1], " believe"]) == {"content": "I believe"}
            pieces = (await post("/tokenize", content="I believe", with_pieces=True))["tokens"]
            assert "".join(piece["piece"] for piece in pieces) == "I believe"
            assert "hi" in (await post("/apply-template", messages=SAY))["prompt"]
            told = await post("/completion", prompt="I believe", n_predict=2, n_probs=2, return_tokens=True)
            assert told["stop_type"] == "limit" and told["tokens_evaluated"] == len(tokens)
            assert [entry["id"] for entry in told["completion_probabilities"]] == told["tokens"]
            wanted = ["content", "generation_settings/n_predict"]
            mixed = [["I", " believe"], {"prompt_string": "I believe"}]
            both = await post("/completions", prompt=mixed, n_predict=2, response_fields=wanted)
            assert both == [{"content": told["content"], wanted[1]: 2}] * 2
            other = await post("/completion", prompt="I believe", n_predict=2, logit_bias=[[told["content"], False]])
            assert not set(other["tokens"]) & set(told["tokens"])
            drawn = {"prompt": "I", "n_predict": 3, "n_probs": 4, "temperature": 0.9, "top_k": 2, "seed": 5}
            before, after = [await post("/completion", **drawn, post_sampling_probs=on) for on in (False, True)]
            assert before["content"] == after["content"]
            for entry in after["completion_probabilities"]:
                likely = {each["id"]: each["prob"] for each in entry["top_probs"]}
                assert (
                    len(likely) == 2 and abs(sum(likely.values()) - 1) < 1e-4 and likely[entry["id"]] == entry["prob"]
                )
            sure = await post(
                "/completion", prompt="I", n_predict=2, n_probs=4, temperature=0, post_sampling_probs=True
            )
            assert [[e["prob"], len(e["top_probs"])] for e in sure["completion_probabilities"]] == [[1.0, 1]] * 2
            stream = (await client.post("/completion", json={"prompt": "I", "n_predict": 2, "stream": True})).text
            steps = [json.loads(line[6:]) for line in stream.splitlines() if line]
            assert [step["stop"] for step in steps] == [False, False, True] and len(steps[0]["tokens"]) == 1
            chat = await post("/v1/chat/completions", messages=SAY, max_tokens=2, verbose=True)
            assert "hi" in chat["__verbose"]["prompt"]
            a = await post("/v1/chat/completions", messages=SAY, grammar='root ::= "a"{3,3}', max_tokens=8)
            assert a["choices"][0]["message"]["content"] == "aaa"
            await post("/v1/chat/completions", 400, messages=SAY, grammar="root ::= this is (not")
            assert (await post("/v1/messages", messages=[], max_tokens=2))["type"] == "message"
            assert (await post("/v1/messages", messages=[], system="Be brief.", max_tokens=2))["type"] == "message"
            assert (await client.get("/slots")).json() == [{"id": 0, "is_processing": False}]
            for wrong in ({}, {"prompt": ""}, {"prompt": "I", "logit_bias": [7]}, {"prompt": "I", "mirostat": 1}):
                await post("/completion", 400, **wrong)
            image = {"prompt_string": "I", "multimodal_data": "x"}
            assert "multimodal" in (await post("/completion", 400, prompt=image))["error"]["message"]

    folder = Path(shutil.copytree(quick_models(2), tmp_path / "model"))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder)
    with closing(ModelService(Shelf([str(folder)]), ServiceOptions(LoadOptions(memory="60MB"), most=1))) as service:
        asyncio.run(test(service))
