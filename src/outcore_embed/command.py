"""``outcore embed``: vectors of texts, or how well they answer a query; many texts share a reading of the weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import xxhash

from outcore.checks import whole
from outcore.cli.engine import ProgressBar, engine_record, model_folder, print_summary, watched
from outcore.cli.flags import loading_options, text_of
from outcore.cli.output import say, tell
from outcore.errors import UsageError
from outcore.options import LoadOptions
from outcore.text import counted

from .embedder import Embedder, open_embedder, shortened_to
from .files import Text, VectorFile, json_line, read_texts
from .kinds import EMBED, RERANK, task_of
from .texts import Encoded, TextReader


def run(args: argparse.Namespace) -> None:
    if args.resume and args.force:
        raise UsageError("--resume and --overwrite: give one of them")
    if args.ranks is not None:
        raise UsageError("embed: several machines cannot share such a model; run it on one")
    rerank, dimensions = args.rerank, args.dimensions
    if dimensions is not None:
        whole("--dimensions", dimensions)
    if (dimensions is not None and rerank is not None) or (args.instruction is not None and rerank is None):
        raise UsageError("--dimensions is for vectors, --instruction for --rerank")
    given = read_texts(args.input)
    folder = model_folder(args)
    if rerank is None and task_of(folder) == RERANK:
        raise UsageError(f"{args.model} rates documents and makes no vectors: give --rerank QUERY")
    reader = TextReader(folder, EMBED if rerank is None else RERANK, trust_remote_code=args.trust_remote_code)
    output: VectorFile | None = None
    if args.output is not None:
        if args.output.suffix == ".npy" and (rerank is not None or not reader.filled):
            raise UsageError(f"--output {args.output}: an array holds one vector a text; name a file of JSON lines")
        digest = xxhash.xxh3_128_hexdigest("\n".join(t.text for t in given).encode("utf-8", "surrogatepass"))
        made_of = (args.model, digest, rerank, args.instruction, dimensions)
        output = VectorFile(args.output, made_of, len(given), args.resume, args.force)
    with ProgressBar() as bar, output if output is not None else nullcontext():
        texts = _encoded(reader, given, rerank, args.instruction, bar)
        _compute(args, folder, reader, given, texts, output, bar)


def _encoded(
    reader: TextReader, given: Sequence[Text], query: str | None, instruction: str | None, bar: ProgressBar
) -> list[Encoded]:
    found: list[Encoded] = []
    query = None if query is None else text_of("--rerank", query)
    for at in range(0, len(given), 256):
        bar.count("reading", at, len(given))
        some = [t.text for t in given[at : at + 256]]
        found += reader.encode(some) if query is None else reader.pairs(query, some, instruction)
    if empty := next((n for n, t in enumerate(found) if not len(t.ids)), None):
        raise UsageError(f"--input: text {empty + 1} has no tokens; leave it out")
    return found


def _compute(
    args: argparse.Namespace,
    folder: Any,
    reader: TextReader,
    given: Sequence[Text],
    texts: Sequence[Encoded],
    output: VectorFile | None,
    bar: ProgressBar,
) -> None:
    resumed = 0 if output is None else output.done
    record: dict[str, Any] = {
        "texts": len(texts),
        "resumed": resumed,
        "tokens": sum(len(t.ids) for t in texts[resumed:]),
        "cut_texts": sum(t.cut for t in texts),
    }
    args.result.record = record
    if output is not None:
        output.begin()
    if resumed < len(texts):
        o = LoadOptions(**loading_options(args))
        o = replace(o, context=o.context or max(len(t.ids) for t in texts))
        with open_embedder(folder, reader, o, bar) as model:
            session = watched(model.model, args)
            began, kept = time.perf_counter(), list[Any]()
            try:
                _readings(args, model, given, texts, output, kept, bar)
            except KeyboardInterrupt:
                bar.clear()
                if output is not None:
                    tell(f"{output.done} of {len(texts)} texts are in {output.path}; --resume continues from there")
                raise
            seconds = time.perf_counter() - began
            bar.clear()
            done = len(texts) - resumed
            record |= {
                "seconds": round(seconds, 4),
                "texts_per_s": round(done / seconds, 3),
                "tokens_per_s": round(record["tokens"] / seconds, 3),
                "width": int(kept[0]) if kept else 0,
            } | engine_record(session)
            if output is None and args.json:
                record["vectors" if args.rerank is None else "relevance_scores"] = kept[1:]
            cut = (
                f"; {counted(record['cut_texts'], 'text')} cut at {reader.limit} tokens" if record["cut_texts"] else ""
            )
            each = f"{counted(done, 'text')}, {record['tokens']} tokens in {seconds:.2f} s"
            print_summary([f"{each}: {record['texts_per_s']} texts a second{cut}"], session)
    if output is not None:
        output.finish()


def _readings(
    args: argparse.Namespace,
    model: Embedder,
    given: Sequence[Text],
    texts: Sequence[Encoded],
    output: VectorFile | None,
    kept: list[Any],
    bar: ProgressBar,
) -> None:
    """Computes reading by reading. ``kept`` gets the width of vectors, and those that are not written to a file."""
    done = 0 if output is None else output.done
    rates = args.rerank is not None
    while done < len(texts):
        bar.count("texts", done, len(texts))
        some = model.next_of(texts[done:])
        found: list[Any] = [float(v[0]) if rates else shortened_to(v, args.dimensions) for v in model.run(some)]
        records = [_record(n, given[n]) for n in range(done, done + len(some))]
        if not kept:
            kept.append(1 if rates else found[0].shape[-1])
        if output is not None:
            output.write(records, found)
        elif args.json:
            kept += [v if rates else v.tolist() for v in found]
        else:
            bar.clear()
            for each, vector in zip(records, found, strict=True):
                say(json_line(each, vector).decode())
        done += len(some)


def _record(number: int, text: Text) -> dict[str, Any]:
    return {"index": number} | ({} if text.id is None else {"id": text.id})
