"""Files of OpenAI's batch format: one request per line of the input, one answer per line of the output.

A line of the output has the digest of the line that it answers, so a killed run can continue from the output alone.
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

# Codes of errors that are not the line's fault. With more memory, or the next version, the line may be answered.
NO_MEMORY, UNFORESEEN = "insufficient_memory", "internal_error"

TRIED_AGAIN = {NO_MEMORY, UNFORESEEN}


@dataclass(frozen=True)
class BatchRequest:
    """A line of the input.

    Attributes:
        id: a digest of the line's text; if two lines are equal, the second one's ends in ``-2``.
        number: the line's number in the file, from 1.
        custom_id: the request's name, if any.
        error: why the request cannot be answered, if that is known already.
    """

    id: str
    number: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    error: RequestError | None = None


def read_lines(path: Path) -> Iterator[BatchRequest]:
    """Yields the lines of a batch's input, without blank ones.

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
    raise ValueError(f"{word} is not a number in JSON")


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
            raise RequestError("custom_id: give a string that no other line has")
        name = given
        if name in names:
            raise RequestError(f"custom_id: line {names[name]} has the same custom_id", "duplicate_custom_id")
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
    chat = line.url == CHAT
    digest = line.id.removeprefix("batch_req_")
    content = {"message": {"role": "assistant", "content": answer.text}} if chat else {"text": answer.text}
    prompt, generated = len(answer.request.tokens), len(answer.tokens)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": answer.finish_reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }
    response = {"status_code": 200, "request_id": f"req_{digest}", "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def line_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BudgetError | MemoryError):
        return RequestError(one_line(error) if str(error) else "not enough memory for this request", NO_MEMORY)
    if isinstance(error, PromptError):
        return RequestError(one_line(error))
    return RequestError(f"{type(error).__name__}: {one_line(error)}", UNFORESEEN)


def refused(line: BatchRequest, error: RequestError) -> dict[str, Any]:
    why = {"code": error.code, "message": f"line {line.number}: {error}"}
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": why}


class Output:
    """The file of answers. Existing content stays until ``begin``. Only one process writes to it.

    Args:
        resume: continue an existing file; an incomplete last line is dropped.
        overwrite: replace an existing file.

    Attributes:
        done: the ids of the lines that are answered, and whether with an answer (True) or an error. A line with an
            error that is tried again (``TRIED_AGAIN``) is not included.

    Raises:
        UsageError: the file exists already, is the input, cannot be written, or is not the output of a batch with that
            model.
    """

    def __init__(self, path: Path, source: Path, model: str, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        self.done: dict[str, bool] = {}
        self._lines = self._again = 0  # number of complete lines, and how many of them are tried again
        try:
            # If the path is a link, it stays one: its target is written and replaced.
            self._real = path.resolve()
            self._new = not self._real.exists()
            if not self._new:
                self._check(source, resume or overwrite)
            # Unbuffered, so that closing does not write again bytes that a full disk has refused.
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
        """Raises UsageError for an existing file, unless it may be continued or replaced."""
        if self._real.samefile(source):
            raise UsageError(f"--output {self.path}: is the input; choose another file")
        if not self._real.is_file():
            raise UsageError(f"--output {self.path}: exists and is no file; name a file")
        if not wanted and self._real.stat().st_size:
            raise UsageError(f"--output {self.path}: exists already; --resume continues it, --overwrite replaces it")

    def _lock(self, file: io.FileIO) -> None:
        try:
            taken = lock_descriptor(file.fileno(), blocking=False) and os.path.samestat(
                os.fstat(file.fileno()), self._real.stat()
            )
        except OSError:
            # Some network file systems have no locks.
            return
        if not taken:  # another process has the lock, or has replaced the file
            raise UsageError(f"--output {self.path}: another outcore batch is writing to it")

    def _read(self, model: str) -> int:
        """Reads the existing lines. Returns the number of bytes up to the end of the last complete line."""
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
                    raise UsageError(f"--output {self.path}: outcore batch did not write line {number}") from None
                if other != model:
                    raise UsageError(
                        f"--output {self.path}: was made with {shortened(other, 200)}; --overwrite replaces it"
                    )
                end += len(raw)
                self._lines = number
        return end

    def require(self, lines: set[str]) -> None:
        """Checks that all existing lines answer requests in ``lines``, the ids of the input.

        Raises:
            UsageError: the input has changed.
        """
        if strange := len(self.done.keys() - lines):
            raise UsageError(
                f"--output {self.path}: {strange} of its lines answer requests that are no longer in the input; "
                "--overwrite replaces it"
            )

    def begin(self) -> None:
        """Removes an incomplete last line, and the errors of lines that are tried again."""
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
        """Rewrites the file atomically without the lines that will be tried again."""
        partial = self._real.with_name(f".{self._real.name[:200]}.{os.getpid()}")
        file = partial.open("xb", buffering=0)
        try:
            with self._real.open("rb") as old:
                kept = (raw for raw in itertools.islice(old, self._lines) if _is_final(json.loads(raw)))
                end = sum(_write_all(file, raw) for raw in kept)
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
            os.fsync(file.fileno())
            with contextlib.suppress(OSError):
                lock_descriptor(file.fileno(), blocking=False)
            partial.replace(self._real)
        except BaseException:
            file.close()
            partial.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file, self._end, self._again = file, end, 0

    def write(self, record: dict[str, Any]) -> None:
        """Appends a line and waits until it is on disk.

        Raises:
            OutputError: the line cannot be written; earlier lines stay.
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
            "continue with --resume"
        )

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        if self._new:
            # The run failed before ``begin``: leave no empty file.
            self._real.unlink(missing_ok=True)


class OutputElsewhere:
    """The ``Output`` on ranks other than 0, which write no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, bool] = {}

    def require(self, lines: set[str]) -> None: ...

    def begin(self) -> None: ...

    def write(self, record: dict[str, Any]) -> None:
        self.done[record["id"]] = record["error"] is None

    def __enter__(self) -> OutputElsewhere:
        return self

    def __exit__(self, *_: object) -> None: ...


def _is_final(record: Mapping[str, Any]) -> bool:
    return record["error"] is None or record["error"].get("code") not in TRIED_AGAIN


def _write_all(file: io.FileIO, line: bytes) -> int:
    left = memoryview(line)
    while left:
        left = left[file.write(left) :]
    return len(line)
