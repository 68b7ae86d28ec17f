"""How many answers to requests for JSON of a schema are JSON of that schema.

    python benchmarks/structured.py MODEL --memory 40MB --json benchmarks/results/structured-cpu.json

`outcore serve` is started with the model, and asked over HTTP for answers of several schemas at temperature 1, each
with another seed; some wait for each other's sweeps. An answer is valid if pydantic makes an object of it without
converting anything; one that was cut off at its most tokens is not. The exit status is 1 if one is invalid.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from result_file import write_result

Short = Annotated[str, Field(max_length=40)]


class Strict(BaseModel):
    """Nothing that the schema does not name."""

    model_config = ConfigDict(extra="forbid")


class Person(Strict):
    name: Short
    age: Annotated[int, Field(ge=0, le=150)]
    member: bool


class Place(Strict):
    city: Short
    at: Annotated[list[float], Field(min_length=2, max_length=2)]
    kind: Literal["village", "town", "city"]


class Group(Strict):
    title: Short
    people: Annotated[list[Person], Field(min_length=1, max_length=3)]
    lead: Person | None


class Code(Strict):
    id: Annotated[str, Field(pattern=r"^[A-Z]{3}-[0-9]{4}$")]
    tags: Annotated[list[Literal["red", "green", "blue"]], Field(max_length=4)]


class Choice(Strict):
    answer: Place | Code
    sure: Annotated[float, Field(ge=0, le=1)]


MODELS: tuple[type[Strict], ...] = (Person, Place, Group, Code, Choice)


@contextmanager
def server(words: Sequence[str]) -> Iterator[str]:
    """`outcore serve`; its address."""
    command = [sys.executable, "-m", "outcore", "serve", "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = next((m for line in process.stdout if (m := re.search(r"http://\S+", line))), None)
        assert found, "it has ended"
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


async def answer(http: httpx.AsyncClient, model: type[Strict], seed: int, tokens: int) -> dict[str, Any]:
    """One answer, and what is wrong with it."""
    form = {"type": "json_schema", "json_schema": {"name": model.__name__, "schema": model.model_json_schema()}}
    body = {
        "messages": [{"role": "user", "content": f"Write one {model.__name__} as JSON."}],
        "temperature": 1,
        "seed": seed,
        "max_tokens": tokens,
        "response_format": form,
    }
    response = await http.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        return {"schema": model.__name__, "seed": seed, "tokens": 0, "wrong": response.text[:300], "text": ""}
    choice = response.json()["choices"][0]
    text, wrong = choice["message"]["content"], ""
    try:
        model.model_validate_json(text, strict=True)
    except ValidationError as e:
        wrong = f"{choice['finish_reason']}: {e.errors()[0]['msg']}: {text[-80:]!r}"
    return {"schema": model.__name__, "seed": seed, "tokens": response.json()["usage"]["completion_tokens"],
            "wrong": wrong, "text": text}  # fmt: skip


async def ask(address: str, answers: int, at_once: int, tokens: int) -> list[dict[str, Any]]:
    """All of them."""
    gate = asyncio.Semaphore(at_once)

    async def one(http: httpx.AsyncClient, seed: int) -> dict[str, Any]:
        async with gate:
            return await answer(http, MODELS[seed % len(MODELS)], seed, tokens)

    async with httpx.AsyncClient(base_url=address, timeout=600) as http:
        return await asyncio.gather(*(one(http, seed) for seed in range(answers)))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--memory", default="40MB")
    p.add_argument("--answers", type=int, default=100)
    p.add_argument("--at-once", type=int, default=4)
    p.add_argument("--max-tokens", type=int, default=1000)
    p.add_argument("--json", type=Path, help="write the result here")
    args = p.parse_args()
    began = time.monotonic()
    words = ["--model", str(args.model), "--memory", args.memory, "--dtype", "float32"]
    with server(words) as address:
        found = asyncio.run(ask(address, args.answers, args.at_once, args.max_tokens))
    invalid = [f for f in found if f["wrong"]]
    different = len({f["text"] for f in found})
    seconds = round(time.monotonic() - began, 1)
    print(f"{len(found) - len(invalid)} of {len(found)} answers valid, {different} different ones, {seconds} s")
    for each in invalid:
        print(f"  {each['schema']}, seed {each['seed']}: {each['wrong']}")
    by_schema = {
        m.__name__: {
            "answers": sum(f["schema"] == m.__name__ for f in found),
            "valid": sum(f["schema"] == m.__name__ and not f["wrong"] for f in found),
            "tokens": sum(f["tokens"] for f in found if f["schema"] == m.__name__),
        }
        for m in MODELS
    }
    write_result(
        args.json, "structured", args.model, answers=len(found), valid=len(found) - len(invalid), different=different,
        by_schema=by_schema, examples=[f["text"] for f in found[: len(MODELS)]], seconds=seconds,
    )  # fmt: skip
    sys.exit(1 if invalid else 0)


if __name__ == "__main__":
    main()
