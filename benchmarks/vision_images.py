"""Prompts with images, streamed: text and log-probabilities of tiny random models equal mlx-vlm's, bit for bit.

    python benchmarks/vision_images.py [FAMILY ...] [--json FILE]

For each family, with the processor that real models have (tests/support/vision_families.py): one and three images, with
a third of the layers in memory, and within the smallest budget; what the tower runs for a second question, for the same
one again, and in a new session; that other pictures give another text. Then the time to the first token, with a larger
tower, of a first and of a second question about the same image.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

import _support  # noqa: F401
import vision_families
from outcore import BudgetError, load, stream_generate
from outcore.machine.allocator import peak_held, reset_peak
from outcore_vision.tower import tower_of
from result_file import write_result

TOKENS = 8
OPTIONS: dict[str, Any] = {"images": True, "context": 256, "draft": "none"}


class Opened:
    """A model of Outcore's, and what its texts are."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model, self.tokenizer = load(folder, **OPTIONS | options)
        self.session = self.model.outcore

    def answer(self, prompt: str, pictures: list[Any]) -> list[Any]:
        return list(stream_generate(self.model, self.tokenizer, prompt, images=pictures, max_tokens=TOKENS))

    @property
    def runs(self) -> int:
        return tower_of(self.model).runs

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()


def differs(got: list[Any], tokens: list[int], scores: list[mx.array]) -> float:
    """The largest difference of log-probabilities; infinite if a token differs."""
    if [r.token for r in got] != tokens:
        return float("inf")
    return max(cast(float, mx.abs(a.logprobs - b).max().item()) for a, b in zip(got, scores, strict=True))


def surveyed(kind: str, work: Path) -> dict[str, Any]:
    folder = vision_families.save_model(kind, work / kind)
    row: dict[str, Any] = {"family": kind}
    pictures = vision_families.pictures(3)
    expected = {
        n: vision_families.theirs(folder, vision_families.prompt_of(kind, n), pictures[:n], TOKENS) for n in (1, 3)
    }
    with Opened(folder, memory="8GB", resident=1, prefix_cache="1GB") as opened:
        row |= {"layers": len(opened.session.size.layers), "streamed": len(opened.session.plan.streamed)}
        for n, (tokens, scores, ids) in expected.items():
            got = opened.answer(vision_families.prompt_of(kind, n), pictures[:n])
            row |= {f"tokens_{n}": len(ids), f"differs_{n}": differs(got, tokens, scores)}
        row["runs_first"] = opened.runs
        again = opened.answer(vision_families.prompt_of(kind, 3), pictures)
        row |= {"differs_again": differs(again, *expected[3][:2]), "found_again": opened.session.found}
        second = [r.token for r in opened.answer(vision_families.prompt_of(kind, 3, "and why?"), pictures)]
        row["runs_second"] = opened.runs - row["runs_first"]
        other = opened.answer(vision_families.prompt_of(kind, 3), pictures[::-1])
        row["others_differ"] = differs(other, *expected[3][:2]) > 0
    with Opened(folder, memory="8GB", resident=1, prefix_cache="off") as opened:
        row |= after_interrupt(opened, vision_families.prompt_of(kind, 3), pictures, expected[3])
    with Opened(folder, memory="8GB", resident=1, prefix_cache="1GB") as opened:
        got = opened.answer(vision_families.prompt_of(kind, 3, "and how?"), pictures)
        same = [r.token for r in opened.answer(vision_families.prompt_of(kind, 3, "and why?"), pictures)] == second
        row |= {"runs_new_session": opened.runs, "same_new_session": same and bool(got)}
    return row | smallest(kind, folder, pictures, expected[3])


def after_interrupt(opened: Opened, prompt: str, pictures: list[Any], expected: Any) -> dict[str, Any]:
    """The same text after one that Ctrl-C ended in its tower's second block, and whether its room was given back."""
    kept, tower = opened.session.size.kept, tower_of(opened.model)
    run_block = tower.run_block

    def interrupted(n: int, run: Any) -> Any:
        if n == 1:
            raise KeyboardInterrupt
        return run_block(n, run)

    tower.__dict__["run_block"] = interrupted
    try:
        opened.answer(prompt, pictures)
        return {"interrupted": False}
    except KeyboardInterrupt:
        pass
    finally:
        del tower.__dict__["run_block"]
    back = opened.session.size.kept == kept
    return {"interrupted": back, "differs_interrupted": differs(opened.answer(prompt, pictures), *expected[:2])}


def smallest(kind: str, folder: Path, pictures: list[Any], expected: Any) -> dict[str, Any]:
    """Within the smallest budget that errors name, from one that is too small on."""
    budget = 1_000_000
    for _ in range(8):
        try:
            with Opened(folder, memory=budget, prefix_cache="off") as opened:
                reset_peak()
                got = opened.answer(vision_families.prompt_of(kind, 3), pictures)
                peak = peak_held()
                return {
                    "budget": budget,
                    "peak": peak,
                    "within": peak <= budget,
                    "differs_smallest": differs(got, *expected[:2]),
                }
        except BudgetError as e:
            if e.smallest is None or e.smallest <= budget:
                raise
            budget = e.smallest
    raise AssertionError(f"{kind}: no budget works")


def timed(work: Path) -> dict[str, Any]:
    """Seconds to the first token of three questions about one image, the last one in a new session."""
    folder = vision_families.save_model("qwen2_5_vl", work / "timed", side=448, vision={"depth": 8, "hidden_size": 320})
    picture = vision_families.pictures(1, 448)
    seconds, found = [], dict[str, Any]()
    for questions in (("what is it?", "and why is it so?"), ("how big is it?",)):
        with Opened(folder, memory="8GB", resident=1, prefix_cache="1GB", context=1024) as opened:
            for question in questions:
                prompt, began = vision_families.prompt_of("qwen2_5_vl", 1, question), time.process_time()
                first = next(stream_generate(opened.model, opened.tokenizer, prompt, images=picture, max_tokens=1))
                seconds.append(round(time.process_time() - began, 3))
                found = {"prompt_tokens": first.prompt_tokens, "runs_last": opened.runs}
    return found | {
        "cpu_s": seconds,
        "second": round(seconds[1] / seconds[0], 3),
        "new": round(seconds[2] / seconds[0], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        os.environ.setdefault("OUTCORE_HOME", str(work / "home"))
        for kind in arguments.families or vision_families.FAMILIES:
            try:
                rows.append(surveyed(kind, work))
            except Exception:
                rows.append({"family": kind, "failed": traceback.format_exc()[-600:]})
            print(rows[-1], flush=True)
            write_result(arguments.json, "vision_images", work, families=rows)
        times = timed(work)
        print(times, flush=True)
        write_result(arguments.json, "vision_images", work, families=rows, first_token=times)


if __name__ == "__main__":
    main()
