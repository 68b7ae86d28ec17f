"""Headers of picture files, read before any of it is decoded.

Each reader walks the file by its format's lengths, and finds the size in pixels, how the picture is turned, and the
bytes that a decoder needs for the first picture alone. Texts, profiles, EXIF and later frames are left out of them:
that is where small files unpack to gigabytes. Imports nothing but the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from outcore.errors import PromptError

# Limits of what is walked through one by one: PNG's chunks; a JPEG's scans, each of which may cover all of it; tags.
MOST_CHUNKS, MOST_SCANS, MOST_TAGS = 50_000, 100, 4096

TRUNCATED = "the file is cut off"


class PictureError(PromptError):
    """A picture cannot be read, or its format or size is not accepted."""


@dataclass(frozen=True)
class Header:
    """What a file says about its picture.

    Attributes:
        kind: the format's name.
        size: width and height in pixels, before turning.
        data: a file of this format that has this picture alone.
        turned: EXIF's orientation, 1 to 8.
        held: bytes that the decoder holds beside the pixels, however small it makes the picture.
    """

    kind: str
    size: tuple[int, int]
    data: bytes = field(repr=False)
    turned: int = 1
    held: int = 0


def header_of(data: bytes) -> Header:
    """Returns the header of a file's first picture.

    Raises:
        PictureError: the file is of no format that is read, is damaged, or is cut off.
    """
    reader = next((read for begin, read in READERS.items() if data.startswith(begin)), None)
    if reader is None or (reader is _webp and data[8:12] != b"WEBP"):
        raise PictureError(_refusal(data))
    try:
        header = reader(data)
    except (IndexError, struct.error):
        raise PictureError(TRUNCATED) from None
    if min(header.size) < 1:
        raise PictureError(f"{header.kind}: the picture has no pixels")
    return header


def _refusal(data: bytes) -> str:
    """Says what a file is that is not read, as far as its first bytes tell."""
    begin, text = data[:4096], data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    named = {
        b"%PDF": "PDF", b"8BPS": "Photoshop", b"\0\0\1\0": "ICO", b"\xff\x0a": "JPEG XL", b"II\x2b\0": "BigTIFF",
        b"MM\0\x2b": "BigTIFF", b"\0\0\0\x0cJXL ": "JPEG XL", b"\0\0\0\x0cjP  ": "JPEG 2000",
        b"\xff\x4f\xff\x51": "JPEG 2000", b"\x1f\x8b": "gzip", b"%!PS": "PostScript", b"PK\3\4": "ZIP",
    }  # fmt: skip
    kind = next((name for start, name in named.items() if begin.startswith(start)), "")
    if begin[4:8] == b"ftyp":
        kind = "AVIF" if begin[8:12] in (b"avif", b"avis") else "HEIC" if begin[8:11] in (b"hei", b"hev") else "a video"
    elif b"<svg" in text and text.startswith(b"<"):
        kind = "SVG"
    elif text.startswith((b"<!doctype html", b"<html")):
        kind = "a web page"
    if not data:
        return "the file is empty"
    return f"{kind or 'this file'} is not read: convert it to JPEG or PNG ({', '.join(NAMES)} are read)"


def _jpeg(data: bytes) -> Header:
    kept, at, size, turned, parts = [b"\xff\xd8"], 2, (0, 0), 1, b""
    progressive = False
    while True:
        if data[at] != 0xFF:
            raise PictureError("JPEG: damaged between its segments")
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker == 0xD9:
            raise PictureError("JPEG: it has no picture")
        (length,) = struct.unpack_from(">H", data, at + 2)
        segment = data[at : at + 2 + length]
        if length < 2 or len(segment) < 2 + length:
            raise PictureError(TRUNCATED)
        if marker in (0xC0, 0xC1, 0xC2):
            if parts:
                raise PictureError("JPEG: it has two frames")
            height, width = struct.unpack_from(">HH", segment, 5)
            size, parts, progressive = (width, height), segment[10:], marker == 0xC2
        elif 0xC3 <= marker <= 0xCF and marker != 0xC4:
            raise PictureError("JPEG: of a kind that is not read (lossless or arithmetic); save it as a usual one")
        elif marker == 0xE1 and segment[4:10] == b"Exif\0\0":
            turned = orientation(segment[10:])
        if marker == 0xDA:
            break
        # Of APPn, the decoder needs JFIF's and Adobe's, which say how colours are stored.
        if not (0xE0 <= marker <= 0xEF or marker == 0xFE) or segment[4:9] in (b"JFIF\0", b"Adobe"):
            kept.append(segment)
        at += 2 + length
    if data.count(b"\xff\xda", at) > MOST_SCANS:
        raise PictureError(f"JPEG: more than {MOST_SCANS} scans")
    # Where scans do not have all colours, the decoder holds the whole picture's coefficients.
    held = _coefficients(size, parts) if progressive or segment[4] < len(parts) // 3 else 0
    return Header("JPEG", size, b"".join((*kept, data[at:])), turned, held)


def _coefficients(size: tuple[int, int], parts: bytes) -> int:
    """Returns the bytes of a JPEG's coefficients; ``parts``: three bytes for each colour."""
    across, down = ([byte >> 4 for byte in parts[1::3]], [byte & 15 for byte in parts[1::3]])
    if not across or 0 in across or 0 in down:
        raise PictureError("JPEG: damaged")
    width, height = size[0] + 63, size[1] + 63
    return sum(2 * width * a // max(across) * height * d // max(down) for a, d in zip(across, down, strict=True))


def _png(data: bytes) -> Header:
    size, turned, kept, pictured = (0, 0), 1, [data[:8]], False
    for number, (name, start, length) in enumerate(_chunks(data, 8, ">I4s")):
        if number > MOST_CHUNKS:
            raise PictureError(f"PNG: more than {MOST_CHUNKS} chunks")
        if name == b"IHDR" and number == 0:
            size = struct.unpack_from(">II", data, start)
        elif name == b"eXIf":
            turned = orientation(data[start : start + length])
        if name == b"IEND" or (pictured and name != b"IDAT" and name[0] & 0x20 == 0):
            break
        pictured = pictured or name == b"IDAT"
        if name in (b"IHDR", b"PLTE", b"tRNS", b"IDAT"):
            kept.append(data[start - 8 : start + length + 4])
    if not pictured:
        raise PictureError(TRUNCATED)
    return Header("PNG", size, b"".join((*kept, b"\0\0\0\0IEND\xaeB`\x82")), turned)


def _chunks(data: bytes, at: int, form: str) -> Iterator[tuple[bytes, int, int]]:
    """Yields each chunk's name, and where its content begins and how long it is. PNG's end with a checksum of 4 bytes,
    RIFF's begin at even places."""
    png = form.startswith(">")
    while at < len(data):
        first, second = struct.unpack_from(form, data, at)
        name, length = (second, first) if png else (first, second)
        if at + 8 + length + (4 if png else 0) > len(data):
            raise PictureError(TRUNCATED)
        yield name, at + 8, length
        at += 8 + length + (4 if png else length & 1)


def _webp(data: bytes) -> Header:
    (length,) = struct.unpack_from("<I", data, 4)
    if len(data) < 8 + length:
        raise PictureError(TRUNCATED)
    size, turned = (0, 0), 1
    for name, start, count in _chunks(data[: 8 + length], 12, "<4sI"):
        if size == (0, 0):
            if name == b"VP8X":
                width, height = data[start + 4 : start + 7], data[start + 7 : start + 10]
                size = int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
            elif name == b"VP8L":
                (bits,) = struct.unpack_from("<I", data, start + 1)
                size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
            elif name == b"VP8 ":
                width, height = struct.unpack_from("<HH", data, start + 6)
                size = width & 0x3FFF, height & 0x3FFF
            else:
                raise PictureError("WebP: damaged")
        if name == b"EXIF":
            turned = orientation(data[start : start + count].removeprefix(b"Exif\0\0"))
    # libwebp holds two canvases, and Pillow copies one.
    return Header("WebP", size, data[: 8 + length], turned, 12 * size[0] * size[1])


def _gif(data: bytes) -> Header:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at, control = 13 + _table(flags), b""
    kept = [data[:at]]
    while data[at] != 0x2C:  # until the first frame
        if data[at] == 0x3B:
            raise PictureError("GIF: it has no picture")
        if data[at] != 0x21:
            raise PictureError("GIF: damaged")
        end = _blocks(data, at + 2)
        control = data[at:end] if data[at + 1] == 0xF9 else control
        at = end
    x, y, w, h, flags = struct.unpack_from("<HHHHB", data, at + 1)
    end = _blocks(data, at + 11 + _table(flags))
    kept += [control, data[at:end], b";"]
    return Header("GIF", (max(width, x + w), max(height, y + h)), b"".join(kept))


def _table(flags: int) -> int:
    """Returns the bytes of a GIF's colour table."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _blocks(data: bytes, at: int) -> int:
    """Returns where a GIF's blocks end, the first of which begins there."""
    while length := data[at]:
        at += 1 + length
    return at + 1


def _bmp(data: bytes) -> Header:
    (length,) = struct.unpack_from("<I", data, 14)
    if length == 12:
        return Header("BMP", struct.unpack_from("<HH", data, 18), data)
    width, height, _, _, packed = struct.unpack_from("<iiHHI", data, 18)
    if packed not in (0, 3, 6):
        raise PictureError("BMP: compressed ones are not read; save it as PNG")
    return Header("BMP", (width, abs(height)), data)


# What is needed of a TIFF's tags: sizes, colours, and where the pixels are.
TIFF_TAGS = {
    256, 257, 258, 259, 262, 266, 273, 277, 278, 279, 284, 292, 293, 317, 320, 322, 323, 324, 325, 338, 339, 347, 530,
    532,
}  # fmt: skip
# None, CCITT's, LZW, JPEG, two of deflate, PackBits.
TIFF_PACKED = {1, 2, 3, 4, 5, 7, 8, 32773, 32946}
WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}


def _tiff(data: bytes) -> Header:
    """Keeps the tags of the first picture that its pixels need, in a directory of their own at the end."""
    order = "<" if data[:2] == b"II" else ">"
    (at,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, at)
    kept, read = list[bytes](), dict[int, int]()
    if count > MOST_TAGS:
        raise PictureError(f"TIFF: more than {MOST_TAGS} tags")
    for entry in (data[start : start + 12] for start in range(at + 2, at + 2 + 12 * count, 12)):
        tag, kind, number = struct.unpack_from(f"{order}HHI", entry)
        if tag in (256, 257, 259, 274) and number == 1 and kind in (3, 4):
            (read[tag],) = struct.unpack_from(order + ("H" if kind == 3 else "I"), entry, 8)
        if tag in TIFF_TAGS:
            kept.append(entry)
            (place,) = struct.unpack_from(f"{order}I", entry, 8)
            size = WIDTHS.get(kind, 8) * number
            if size > 4 and place + size > len(data):
                raise PictureError(TRUNCATED)
    tags = {struct.unpack_from(f"{order}H", entry)[0] for entry in kept}
    if len(tags) < len(kept) or 256 not in read or 257 not in read:
        raise PictureError("TIFF: damaged")
    if read.get(259, 1) not in TIFF_PACKED:
        raise PictureError("TIFF: compressed in a way that is not read; save it as PNG")
    end = len(data) + (len(data) & 1)
    directory = struct.pack(f"{order}H", len(kept)) + b"".join(kept) + bytes(4)
    made = data[:4] + struct.pack(f"{order}I", end) + data[8:] + bytes(len(data) & 1) + directory
    turned = read.get(274, 1)
    return Header("TIFF", (read[256], read[257]), made, turned if 1 <= turned <= 8 else 1)


def orientation(exif: bytes) -> int:
    """Returns EXIF's orientation, 1 to 8, of which 1 is upright; 1 also for damaged EXIF."""
    order = "<" if exif[:2] == b"II" else ">"
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * min(count, MOST_TAGS), 12):
            tag, _, _, turned = struct.unpack_from(f"{order}HHIH", exif, entry)
            if tag == 0x0112:
                return turned if 1 <= turned <= 8 else 1
    except struct.error:
        pass
    return 1


READERS: dict[bytes, Callable[[bytes], Header]] = {
    b"\xff\xd8\xff": _jpeg, b"\x89PNG\r\n\x1a\n": _png, b"RIFF": _webp, b"GIF87a": _gif, b"GIF89a": _gif, b"BM": _bmp,
    b"II\x2a\0": _tiff, b"MM\0\x2a": _tiff,
}  # fmt: skip
NAMES = "JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF"
