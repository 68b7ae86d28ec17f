"""Reads pictures for models: from a file, bytes, a data URI or an address to a bounded RGB image.

Sizes are checked before anything is decoded. JPEGs are decoded smaller where they are large; other formats cannot be,
and are refused. Transparent pixels become white, EXIF's rotation is applied, colour profiles are not. Of an animation,
the first frame is taken.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import math
import os
import stat
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outcore.text import one_line, shortened

from .formats import TRUNCATED, Header, PictureError, header_of

if TYPE_CHECKING:
    from PIL import Image

# Bytes of a file; pixels of one, at most: of any format, and of a picture in memory before it is made smaller.
MOST_BYTES = 64_000_000
MOST_PIXELS, MOST_DECODED = 200_000_000, 40_000_000
# Bytes that a decoder may hold beside the pixels: what a progressive JPEG of 80 megapixels needs.
MOST_HELD = 240_000_000
# Pixels that a model is given, unless its processor takes other sizes. Qwen3-VL's takes the most, 2**24.
GIVEN = 1 << 24

ROWS = 256
CLASSES = {"JPEG": "Jpeg", "PNG": "Png", "WebP": "WebP", "GIF": "Gif", "BMP": "Bmp", "TIFF": "Tiff"}
NEEDS = "pictures need Pillow: pip install 'outcore[vision]'"

# Gets the bytes behind an http or https address.
Fetch = Callable[[str], bytes]


def read_picture(source: bytes | str | Path, fetch: Fetch | None = None, most_pixels: int = GIVEN) -> Image.Image:
    """Returns a picture as Pillow's image of mode RGB, upright.

    Args:
        source: a file's bytes or path, a ``data:`` URI, or an http(s) address.
        fetch: gets what is at an address; None: addresses are refused.
        most_pixels: the picture is made smaller if it has more.

    Raises:
        PictureError: it cannot be read, is too large, or is of a format that is not read.
    """
    if isinstance(source, str):
        scheme = source[:8].partition(":")[0].lower()
        if scheme == "data":
            source = data_of_uri(source)
        elif scheme in ("http", "https"):
            if fetch is None:
                raise PictureError("addresses are not fetched without --allow-remote-images; send the picture itself")
            source = fetch(source)
        else:
            source = Path(source)
    return decoded(source if isinstance(source, bytes) else file_bytes(source), most_pixels)


def data_of_uri(uri: str) -> bytes:
    """Returns the bytes of a ``data:`` URI in base64."""
    head, comma, text = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise PictureError("a data URI in base64 is needed: data:image/png;base64,...")
    return base64_bytes(text)


def base64_bytes(text: str) -> bytes:
    """Returns the bytes of a text in base64, with or without line breaks and padding."""
    if len(text) * 3 // 4 > MOST_BYTES + 3:
        raise PictureError(f"larger than {MOST_BYTES} bytes")
    try:
        plain = text.encode("ascii").translate(None, b" \t\r\n")
        return base64.b64decode(plain.rstrip(b"=") + b"=" * (-len(plain.rstrip(b"=")) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise PictureError("not base64") from None


def file_bytes(path: Path) -> bytes:
    """Returns what a file has; pipes and devices are not read, since they may never end."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PictureError("not a file; - reads standard input")
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as e:
        raise PictureError(getattr(e, "strerror", None) or one_line(e)) from None
    return data


def decoded(data: bytes, most_pixels: int = GIVEN) -> Image.Image:
    """Decodes a file to an image of at most ``most_pixels``, of mode RGB and upright."""
    if len(data) > MOST_BYTES:
        raise PictureError(f"larger than {MOST_BYTES} bytes")
    header = header_of(data)
    shrink = _checked(header)
    try:
        image = _opened(header, shrink)
        image = _smaller(_rgb(image), most_pixels)
        if header.turned > 1:
            image = image.transpose(_turn(header.turned))
    except PictureError:
        raise
    except OSError as e:
        cut = "truncated" in str(e) or "broken data" in str(e) or "incomplete" in str(e)
        raise PictureError(f"{header.kind}: {TRUNCATED if cut else shortened(one_line(e), 200)}") from None
    except MemoryError:
        raise PictureError(f"{header.kind}: not enough memory to decode it") from None
    except Exception as e:  # a damaged file, at which Pillow's code may fail in any way
        raise PictureError(f"{header.kind}: damaged ({shortened(one_line(e), 200)})") from None
    return image


def _checked(header: Header) -> int:
    """Returns by how much a JPEG is decoded smaller: 1, 2, 4 or 8. Raises PictureError if the picture is too large."""
    (width, height), kind = header.size, header.kind
    pixels = width * height
    said = f"{kind} of {width} x {height} pixels"
    if kind != "JPEG" and pixels > MOST_DECODED:
        most = f"{MOST_DECODED / 1e6:.0f} megapixels"
        raise PictureError(f"{said}: more than {most}; make it smaller, or a JPEG, which is decoded smaller")
    if pixels > MOST_PIXELS:
        raise PictureError(f"{said}: more than {MOST_PIXELS / 1e6:.0f} megapixels; make it smaller")
    if header.held > MOST_HELD:
        hint = "save it as a usual JPEG, not progressive" if kind == "JPEG" else "make it smaller, or a JPEG"
        held, most = (f"{n / 1e6:.0f} MB" for n in (header.held, MOST_HELD))
        raise PictureError(f"{said}: decoding it takes {held}, more than {most}; {hint}")
    return next(s for s in (1, 2, 4, 8) if pixels <= MOST_DECODED * s * s)


def _opened(header: Header, shrink: int) -> Any:
    """Decodes the picture; by its format's class, as ``Image.open`` warns of sizes that were checked here."""
    try:
        module = importlib.import_module(f"PIL.{CLASSES[header.kind]}ImagePlugin")
    except ModuleNotFoundError:
        raise PictureError(NEEDS) from None
    image = getattr(module, f"{CLASSES[header.kind]}ImageFile")(BytesIO(header.data))
    if image.size != header.size:
        raise PictureError(f"{header.kind}: damaged: its sizes differ")
    if shrink > 1:
        image.draft("RGB", (header.size[0] // shrink, header.size[1] // shrink))
    image.load()
    return image


def _rgb(image: Any) -> Any:
    """Converts to RGB on white, some rows at a time, so that only the result takes memory."""
    from PIL import Image

    if image.mode in ("I", "F"):
        raise PictureError("32 bits a pixel and colour are not read; save it with 8 or 16")
    clear = image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info
    if image.mode == "RGB" and not clear:
        return image
    made = Image.new("RGB", image.size, "white")
    for top in range(0, image.height, ROWS):
        part = image.crop((0, top, image.width, min(top + ROWS, image.height)))
        if image.mode.startswith("I;16"):
            part = _high_bytes(part)
        if clear and part.mode != "I;16":
            part = part.convert("RGBA")
            made.paste(part, (0, top), part)
        else:
            made.paste(part.convert("RGB"), (0, top))
    return made


def _high_bytes(image: Any) -> Any:
    """Returns a picture of 16 bits as one of 8; Pillow itself would cut off what is larger than 255."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.uint16)
    return Image.fromarray((values >> 8).astype(np.uint8))


def _smaller(image: Any, most_pixels: int) -> Any:
    from PIL import Image

    pixels = image.width * image.height
    if pixels <= most_pixels:
        return image
    scale = math.sqrt(most_pixels / pixels)
    short = max(1, int(min(image.size) * scale))
    long = max(1, min(int(max(image.size) * scale), most_pixels // short))  # of a line that is one pixel wide
    size = (long, short) if image.width > image.height else (short, long)
    return image.resize(size, Image.Resampling.LANCZOS)


def _turn(turned: int) -> Any:
    from PIL.Image import Transpose as T

    return (T.FLIP_LEFT_RIGHT, T.ROTATE_180, T.FLIP_TOP_BOTTOM, T.TRANSPOSE, T.ROTATE_270, T.TRANSVERSE, T.ROTATE_90)[
        turned - 2
    ]
