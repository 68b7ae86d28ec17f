"""Files of OpenAI's batch format: requests in, a line each; answers out, appended whole, so that a run that was killed
goes on where it was.

A line of the output carries the digest of the line that it answers, so going on needs no other record.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash
from filelock import lock_descriptor

from outcore.checks import not_endless
from outcore.decode.batch import RequestOutput
from outcore.errors import BudgetError, OutputError, PromptError, RequestError, UsageError
from outcore.text import one_line, shortened

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, COMPLETION)

NO_MEMORY, UNFORESEEN = "insufficient_memory", "internal_error"
"""Codes of errors that are none of the line's own: with more memory, or the next version, it may be answered."""

TRIED_AGAIN = {NO_MEMORY, UNFORESEEN}


@dataclass(frozen=True)
class BatchRequest:
    """A line of the input.

    Attributes:
        id: a digest of what it says; of lines that say the same, the second one's ends in ``-2``.
        number: its place in the file, from 1.
        custom_id: its name, where it has one.
        error: why it cannot be answered; None: it can, as far as is known.
    """

    id: str
    number: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    error: RequestError | None = None


def read_lines(path: Path) -> Iterator[BatchRequest]:
    """The lines of a batch's input, blank ones left out.

    Raises:
        UsageError: the file cannot be read.
    """
    seen: dict[str, int] = {}
    names: dict[str, int] = {}
    try:
        with not_endless("--input", path).open("rb") as file:
            for number, raw in enumerate(file, 1):
                text = raw.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip()
                if not text:
                    continue
                digest = "batch_req_" + xxhash.xxh3_128_hexdigest(text)
                seen[digest] = seen.get(digest, 0) + 1
                line_id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
                yield _line(text, line_id, number, names)
    except OSError as e:
        raise UsageError(f"--input {path}: cannot be read: {e.strerror or e}") from e


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _line(text: bytes, line_id: str, number: int, names: dict[str, int]) -> BatchRequest:
    name: str | None = None
    try:
        try:
            request = json.loads(text.decode("utf-8"), parse_constant=_no_number)
        except (ValueError, RecursionError) as e:
            raise RequestError(f"not JSON: {one_line(e)}", "invalid_json") from None
        if not isinstance(request, dict):
            raise RequestError("not a JSON object", "invalid_json")
        given = request.get("custom_id")
        if not isinstance(given, str) or not given:
            raise RequestError("custom_id: a string is needed that no other line has")
        name = given
        if name in names:
            raise RequestError(f"custom_id: line {names[name]} has the same", "duplicate_custom_id")
        names[name] = number
        if request.get("method", "POST") != "POST":
            raise RequestError("method: must be POST")
        url = request.get("url")
        if url not in URLS:
            raise RequestError(f"url: must be {' or '.join(URLS)}", "unsupported_url")
        return BatchRequest(line_id, number, name, url, request.get("body"))
    except RequestError as e:
        return BatchRequest(line_id, number, name, error=e)


def answered(line: BatchRequest, answer: RequestOutput, model: str) -> dict[str, Any]:
    """A line of the output, in OpenAI's format."""
    chat = line.url == CHAT
    digest = line.id.removeprefix("batch_req_")
    said = {"message": {"role": "assistant", "content": answer.text}} if chat else {"text": answer.text}
    prompt, generated = len(answer.request.tokens), len(answer.tokens)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": answer.finish_reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }
    response = {"status_code": 200, "request_id": f"req_{digest}", "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def line_error(error: Exception) -> RequestError:
    """Any error as that of the line that it came with."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BudgetError | MemoryError):
        return RequestError(one_line(error) if str(error) else "no memory for it", NO_MEMORY)
    if isinstance(error, PromptError):
        return RequestError(one_line(error))
    return RequestError(f"{type(error).__name__}: {one_line(error)}", UNFORESEEN)


def refused(line: BatchRequest, error: RequestError) -> dict[str, Any]:
    """The same for a line that cannot be answered."""
    told = {"code": error.code, "message": f"line {line.number}: {error}"}
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": told}


class Output:
    """The answers' file. Nothing that is there is lost before ``begin``; only one process writes to it.

    Args:
        resume: go on with what is there; a last line that was cut off is dropped.
        overwrite: replace it.

    Attributes:
        done: ids of the lines that it answers, and whether each got an answer or an error. What failed for no fault of
            its own (``TRIED_AGAIN``) is not among them when the run goes on.

    Raises:
        UsageError: it is there already, is the input, or cannot be written; it is no output of a batch with that model.
    """

    def __init__(self, path: Path, source: Path, model: str, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        self.done: dict[str, bool] = {}
        self._lines = self._again = 0  # that are there whole, and those of them that are tried again
        try:
            # A link stays one: its target is what is written, and replaced.
            self._real = path.resolve()
            self._new = not self._real.exists()
            if not self._new:
                self._check(source, resume or overwrite)
            # Without a buffer: what a full disk did not take shall not be written when the file is closed.
            self._file = self._real.open("ab", buffering=0)
        except (OSError, RuntimeError) as e:
            raise UsageError(f"--output {path}: cannot be written: {getattr(e, 'strerror', None) or e}") from e
        try:
            self._lock(self._file)
            self._end = 0 if overwrite else self._read(model)
        except BaseException:
            self._file.close()
            raise

    def _check(self, source: Path, wanted: bool) -> None:
        """Refuse what is there, unless it is a file that may be gone on with or replaced."""
        if self._real.samefile(source):
            raise UsageError(f"--output {self.path}: is the input; choose another file")
        if not self._real.is_file():
            raise UsageError(f"--output {self.path}: is there and no file; answers need one, to go on with")
        if not wanted and self._real.stat().st_size:
            raise UsageError(
                f"--output {self.path}: is there already; --resume goes on with it, --overwrite replaces it"
            )

    def _lock(self, file: io.FileIO) -> None:
        try:
            taken = lock_descriptor(file.fileno(), blocking=False) and os.path.samestat(
                os.fstat(file.fileno()), self._real.stat()
            )
        except OSError:
            # Some network file systems have no locks.
            return
        if not taken:  # or it was replaced while we waited for it
            raise UsageError(f"--output {self.path}: another outcore batch is writing to it")

    def _read(self, model: str) -> int:
        """Take note of what is there; bytes up to the end of the last whole line."""
        end = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break
                try:
                    record = json.loads(raw)
                    line_id, response = record["id"], record["response"]
                    other = response["body"]["model"] if response else model
                    if _is_final(record):
                        self.done[line_id] = record["error"] is None
                    else:
                        self._again += 1
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    raise UsageError(f"--output {self.path}: line {number} is none of a batch's output") from None
                if other != model:
                    raise UsageError(
                        f"--output {self.path}: was made with {shortened(other, 200)}; --overwrite replaces it"
                    )
                end += len(raw)
                self._lines = number
        return end

    def require(self, lines: set[str]) -> None:
        """Refuse to go on with the answers to other lines.

        Raises:
            UsageError: the input has changed.
        """
        if strange := len(self.done.keys() - lines):
            raise UsageError(
                f"--output {self.path}: {strange} of its lines answer none of the input, which has changed; "
                "--overwrite replaces it"
            )

    def begin(self) -> None:
        """Cut off what is not to stay: a line that was cut off, and errors of lines that are tried again."""
        try:
            if self._again and self._end:
                self._leave_out()
            else:
                self._file.truncate(self._end)
                os.fsync(self._file.fileno())
            self._new = False
        except OSError as e:
            raise self._failed(e) from e

    def _leave_out(self) -> None:
        """Replace the file by one without the lines that are tried again; it is one or the other at any time."""
        beside = self._real.with_name(f".{self._real.name[:200]}.{os.getpid()}")
        file = beside.open("xb", buffering=0)
        try:
            with self._real.open("rb") as old:
                kept = (raw for raw in itertools.islice(old, self._lines) if _is_final(json.loads(raw)))
                end = sum(_write_all(file, raw) for raw in kept)
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
            os.fsync(file.fileno())
            with contextlib.suppress(OSError):
                lock_descriptor(file.fileno(), blocking=False)
            beside.replace(self._real)
        except BaseException:
            file.close()
            beside.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file, self._end, self._again = file, end, 0

    def write(self, record: dict[str, Any]) -> None:
        """Append a line, and wait until the disk has it.

        Raises:
            OutputError: there is no room for it; what was written before stays.
        """
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            _write_all(self._file, line)
            os.fsync(self._file.fileno())
        except OSError as e:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise self._failed(e) from e
        self._end += len(line)
        self.done[record["id"]] = record["error"] is None

    def _failed(self, e: OSError) -> OutputError:
        return OutputError(
            f"{self.path}: cannot be written: {e.strerror or e}; its {len(self.done)} lines are kept: make room, and "
            "go on with --resume"
        )

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        if self._new:
            # Never begun: it was not there, and shall not be.
            self._real.unlink(missing_ok=True)


class OutputElsewhere:
    """What ranks have beside the first, which writes the answers' file: nothing is written here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, bool] = {}

    def require(self, lines: set[str]) -> None:
        """The first rank does."""

    def begin(self) -> None:
        """Nothing to cut off."""

    def write(self, record: dict[str, Any]) -> None:
        """Take note of it."""
        self.done[record["id"]] = record["error"] is None

    def __enter__(self) -> OutputElsewhere:
        return self

    def __exit__(self, *_: object) -> None: ...


def _is_final(record: Mapping[str, Any]) -> bool:
    """Whether a line of the output says the last of the line that it answers."""
    return record["error"] is None or record["error"].get("code") not in TRIED_AGAIN


def _write_all(file: io.FileIO, line: bytes) -> int:
    left = memoryview(line)
    while left:
        left = left[file.write(left) :]
    return len(line)
