"""Pictures in requests: content parts of the server's APIs, and what ``--image`` names (the core's group ``parts``).

A part is only checked when its request is read. ``ready`` fetches and decodes pictures before the prompt is made, a
few at a time, so that neither a picture nor an address keeps other requests waiting.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.checkpoint.positions import config_of
from outcore.decode.media import TEXT_ONLY, media_reader
from outcore.errors import UsageError
from outcore.machine.small_files import TOKENIZER_BYTES, parse_json, read_small
from outcore.modules.mlx_lm_compat import MODEL_TYPES
from outcore.serve.requests import UNSUPPORTED, wrong
from outcore.text import shortened

from .fetch import fetched
from .formats import PictureError
from .model_types import NAME, NEEDS, folder_of, installed
from .pictures import GIVEN, MOST_BYTES, base64_bytes, data_of_uri, decoded, read_picture

# Bytes that fit into a request in base64. Of one request: pictures, and their pixels when they are decoded. Of all
# requests at once: pixels.
SENT_BYTES, MOST_PICTURES, MOST_PIXELS, MOST_HELD = 24_000_000, 64, 1 << 25, 1 << 26
# Pixels that every model is given, if the picture has them; and of pictures that need little detail, as OpenAI's.
LEAST_GIVEN, LOW = 1 << 22, 512 * 512
SETTINGS = "preprocessor_config.json", "processor_config.json"

# How many are fetched and decoded at a time: of threads that others need too, and of memory.
FETCHED, DECODED = 3, 2

_gates = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[asyncio.Semaphore, asyncio.Semaphore]]()
_held, _freed = 0, deque[int]()  # pixels of the requests under way, and of those that are over since; of any thread


@dataclass(frozen=True)
class Sent:
    """A picture of a request, not decoded yet.

    Attributes:
        where: path of the part, for errors.
        source: its bytes in base64, a data URI, or an address.
        low: little detail is enough.
    """

    where: str
    source: str
    low: bool = False

    @property
    def remote(self) -> bool:
        return self.source[:8].lower().startswith(("http://", "https://"))

    def data(self, remote: bool) -> bytes:
        """Returns the file. Raises RequestError. ``remote``: it is fetched if it is an address."""
        text = self.source
        with self.named():
            if text[:5].lower() == "data:":
                return data_of_uri(text)
            if not self.remote:
                return base64_bytes(text)
            if not remote:
                raise PictureError("this server fetches no addresses (--allow-remote-images); send a data URI")
            return fetched(text)

    def picture(self, data: bytes, most_pixels: int) -> Any:
        """Returns Pillow's image of the file. Raises RequestError."""
        with self.named():
            return decoded(data, min(most_pixels, LOW) if self.low else most_pixels)

    @contextmanager
    def named(self) -> Iterator[None]:
        try:
            yield
        except PictureError as e:
            raise wrong(self.where, str(e), "invalid_image") from None


def takes(folder: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Returns what the model in a folder takes: pixels of a picture, its bytes, and pictures of a request; empty: text
    only. Imports neither Pillow nor mlx-vlm."""
    if not config.get("vision_config") or folder_of({**config, MODEL_TYPES: NAME}) is None:
        return {}
    return {"pixels": _pixels(folder), "bytes": SENT_BYTES, "count": MOST_PICTURES}


def _pixels(folder: Path) -> int:
    """Returns the most pixels that a model's processor uses, as far as its settings say; more would be lost."""
    for name in SETTINGS:
        try:
            found = parse_json(read_small(folder / name, TOKENIZER_BYTES))
        except (OSError, ValueError):
            continue
        found = found.get("image_processor", found) if isinstance(found, Mapping) else {}
        found = found if isinstance(found, Mapping) else {}
        size = found["size"] if isinstance(found.get("size"), Mapping) else {}
        # Of Qwen's kind, the longest edge is a number of pixels.
        for stated in (found.get("max_pixels"), size.get("max_pixels"), size.get("longest_edge")):
            if type(stated) is int and stated > LEAST_GIVEN:
                return min(stated, GIVEN)
    return LEAST_GIVEN


# Readers of content parts


def _image_url(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """OpenAI's, of chats and of responses: an object with an address, or the address."""
    given, at = part.get("image_url"), f"{where}.image_url"
    detail = given.get("detail") if isinstance(given, Mapping) else part.get("detail")
    if isinstance(given, Mapping):
        given, at = given.get("url"), f"{at}.url"
    if given is None and part.get("file_id") is not None:
        raise wrong(f"{where}.file_id", "this server keeps no files; send a data URI as image_url", UNSUPPORTED)
    return _part(given, at, low=detail == "low", uri=True)


def _image(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Anthropic's, with a source; and Ollama's, which is base64 alone."""
    source = part.get("source")
    if not isinstance(source, Mapping):
        return _part(part.get("data"), where)
    kind = source.get("type")
    if kind == "base64":
        return _part(source.get("data"), f"{where}.source.data")
    if kind == "url":
        return _part(source.get("url"), f"{where}.source.url", uri=True)
    raise wrong(f"{where}.source.type", "base64 or url is needed", UNSUPPORTED)


def _part(given: Any, where: str, *, low: bool = False, uri: bool = False) -> dict[str, Any]:
    if not isinstance(given, str) or not given:
        raise wrong(where, "a string is needed: an address or a data URI" if uri else "a string in base64 is needed")
    schemes = ("data:", "http://", "https://")
    if uri and not given[:8].lower().startswith(schemes):
        raise wrong(where, "an address is needed that begins with data:, http:// or https://")
    return {"type": "image", "image": Sent(where, given, low)}


READERS: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "image_url": _image_url, "input_image": _image_url, "image": _image,
}  # fmt: skip


def _sent(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for content in (message.get("content") for message in messages):
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "image" and isinstance(part.get("image"), Sent):
                yield part


async def ready(messages: Sequence[Mapping[str, Any]], taken: Mapping[str, int], remote: bool) -> None:
    """Decodes the pictures of a request's messages, in their places; ``taken``: as ``takes``, of its model.

    Raises:
        RequestError: the model reads text only, there are too many, or one cannot be read.
    """
    parts = list(_sent(messages))
    if not parts:
        return
    if not taken:
        raise wrong(parts[0]["image"].where, "this model reads text only", UNSUPPORTED)
    if len(parts) > taken["count"]:
        raise wrong(parts[taken["count"]]["image"].where, f"more than {taken['count']} pictures in a request")
    made = asyncio.Semaphore(FETCHED), asyncio.Semaphore(DECODED)
    fetching, decoding = _gates.setdefault(asyncio.get_running_loop(), made)
    # What is fetched comes first: a slow address keeps no room of others.
    came, size = dict[int, bytes](), 0
    for n, sent in enumerate(part["image"] for part in parts):
        if sent.remote:
            async with fetching:
                came[n] = await asyncio.to_thread(sent.data, remote)
            size += len(came[n])
            if size > SENT_BYTES:
                raise wrong(sent.where, f"more than {SENT_BYTES / 1e6:.0f} MB by addresses in a request")
    # Counted before decoding: otherwise requests that come at the same time would all find room.
    pixels, coming = 0, min(MOST_PIXELS, len(parts) * taken["pixels"])
    while held() and held() + coming > MOST_HELD:  # until others have their answers
        await asyncio.sleep(0.1)
    try:
        held(more=coming)
        for n, part in enumerate(parts):
            sent = part["image"]
            async with decoding:
                data = came.pop(n, b"") or await asyncio.to_thread(sent.data, remote)
                part["image"] = image = await asyncio.to_thread(sent.picture, data, taken["pixels"])
            size = image.width * image.height
            pixels += size
            held(image, -min(size, coming))
            coming -= min(size, coming)
            if pixels > MOST_PIXELS:
                most = f"{MOST_PIXELS / 1e6:.0f} megapixels in all pictures of a request"
                raise wrong(sent.where, f"more than {most}: send smaller or fewer ones")
    finally:
        held(more=-coming)


def held(image: Any = None, more: int = 0) -> int:
    """Returns the pixels of all requests under way, after ``more`` (or fewer, if negative) and those of ``image`` were
    added; an image counts until it is freed. Only one thread may call it."""
    global _held
    _held += more
    while _freed:
        _held -= _freed.popleft()
    if image is not None:
        _held += image.width * image.height
        weakref.finalize(image, _freed.append, image.width * image.height)
    return _held


class CommandImages:
    """The images of a prompt on the command line.

    Attributes:
        mark: what stands for them at the beginning of the message.
        sizes: width and height of each.
        read: the images as the model's reader made them, once ``encode`` has read the prompt.
    """

    def __init__(self, args: Namespace, folder: Path, names: Sequence[str]) -> None:
        config = {**config_of(folder), MODEL_TYPES: NAME}
        reader, taken = media_reader(folder, config, args.ranks), takes(folder, config)
        if reader is None or not taken:
            why = "images are not shared between machines" if args.ranks is not None else TEXT_ONLY
            if config.get("vision_config") and not installed():
                why = f"to read images, this model {NEEDS}"
            raise UsageError(f"{shortened(names[0])}: {why}")
        if not args.image and folder_of(config_of(folder)) is None:
            why = "this chat was begun without images, and so mlx-lm reads the model's text only; begin it with --image"
            raise UsageError(f"{shortened(names[0])}: {why}")
        if getattr(args, "prompt_cache_file", None) is not None:
            raise UsageError("--image: does not work with --prompt-cache-file")
        opened = [_opened(name, taken, args.allow_remote_images) for name in names]
        self._reader, self._opened, self.names = reader, opened, tuple(names)
        self.mark, self.read = reader.mark * len(opened), list[Any]()
        self.sizes = [image.size for image in opened]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the tokens of a text that has ``mark``."""
        tokens, self.read = self._reader.read(text, self._opened, special=add_special_tokens)
        return tokens


def _opened(source: str, taken: Mapping[str, int], remote: bool) -> Any:
    """Returns Pillow's image of what ``--image`` names: a file, an address, a data URI, or - for standard input."""
    try:
        given = sys.stdin.buffer.read(MOST_BYTES + 1) if source == "-" else source
        if isinstance(given, str) and given[:7].lower() == "file://":
            raise PictureError("give the file's path")
        return read_picture(given, fetched if remote else None, taken["pixels"])
    except PictureError as e:
        raise UsageError(f"{shortened(source)}: {e}") from None
