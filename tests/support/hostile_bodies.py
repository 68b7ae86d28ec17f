"""Bodies of requests that are not to be believed."""

from __future__ import annotations

import json
import random


def bodies(seed: int, count: int) -> list[bytes]:
    """What is not to be believed: bytes, cut and changed JSON, deep, endless and huge values, in random shapes."""
    rng = random.Random(seed)
    whole = json.dumps({"prompt": "a b", "stream": True, "list": [1, 2.5, None, {"é": "x"}], "n": -1}).encode()

    def noise() -> bytes:
        return rng.randbytes(rng.randrange(1, 300))

    def cut() -> bytes:
        return whole[: rng.randrange(1, len(whole))]

    def changed() -> bytes:
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)

    def deep() -> bytes:
        n = rng.choice((99, 150, 1000, 50_000))
        left, right = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        return left * n + b"1" + right * (n if rng.random() < 0.5 else 0)

    def values() -> bytes:
        odd = (b"NaN", b"-Infinity", b"1e999", b"-1e400", b"9" * 5000, b'"\\ud800"', b'"\xff"', b"nul", b"01", b"''",
               b'"\\u0000"', b"true", b"[]", b'{"a":1,"a":2}', b"1e-999")  # fmt: skip
        value = rng.choice(odd)
        return rng.choice((value, b'{"prompt":' + value + b"}", b"[" + value + b"]"))

    def wide() -> bytes:
        return b'{"prompt":[' + b"[]," * rng.randrange(3_000, 30_000) + b"1]}"

    kinds = noise, cut, changed, deep, values, wide
    return [rng.choice(kinds)() for _ in range(count)]
