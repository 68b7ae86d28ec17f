"""Pictures: every form reads right, hostile files are refused before they are decoded. Needs Pillow."""

from __future__ import annotations

import base64
import os
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'outcore[vision]'")

from outcore_vision import pictures  # noqa: E402
from outcore_vision.formats import PictureError, header_of  # noqa: E402
from outcore_vision.pictures import decoded, read_picture  # noqa: E402


def photo(width: int = 40, height: int = 24) -> Any:
    """A picture whose corners differ: red, green, blue, grey."""
    corners = np.array([[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (128, 128, 128)]], np.uint8)
    return Image.fromarray(corners.repeat(height // 2, 0).repeat(width // 2, 1))


def written(image: Any, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def corners(image: Any) -> list[tuple[int, ...]]:
    w, h = image.width - 1, image.height - 1
    return [image.getpixel(at) for at in ((0, 0), (w, 0), (0, h), (w, h))]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *more: bytes, depth: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def near(found: Any, wanted: Any, most: int = 3) -> bool:
    return bool(np.abs(np.asarray(found, int) - np.asarray(wanted, int)).max() <= most)


CORNERS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128)]


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        ("PNG", {}, 0), ("BMP", {}, 0), ("TIFF", {}, 0), ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("TIFF", {"compression": "tiff_adobe_deflate"}, 0), ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 95}, 40), ("JPEG", {"quality": 98, "subsampling": 0}, 3),
        ("JPEG", {"quality": 98, "subsampling": 0, "progressive": True}, 3),
    ],
)  # fmt: skip
def test_every_format_reads_as_the_picture_it_was(kind: str, options: dict[str, Any], most: int) -> None:
    found = decoded(written(photo(), kind, **options))
    assert found.mode == "RGB" and found.size == (40, 24)
    assert near(corners(found), CORNERS, most)


def test_palettes_greys_and_bits_become_colours() -> None:
    for mode in ("P", "L", "1"):
        wanted = photo().convert(mode).convert("RGB")
        assert corners(decoded(written(photo().convert(mode), "PNG"))) == corners(wanted)
    assert corners(decoded(written(photo().quantize(8), "GIF"))) == corners(photo())


def test_sixteen_bits_keep_their_greys() -> None:
    values = np.full((8, 8), 40_000, np.uint16)
    values[0] = 300
    for kind in ("PNG", "TIFF"):
        found = decoded(written(Image.fromarray(values), kind))
        assert found.getpixel((0, 0)) == (1, 1, 1) and found.getpixel((7, 7)) == (156, 156, 156)
    raw = b"".join(b"\0" + struct.pack(">HHH", 65535, 32768, 0) * 4 for _ in range(4))
    assert decoded(png(4, 4, depth=16, data=zlib.compress(raw))).getpixel((0, 0)) == (255, 128, 0)


def test_cmyk_is_as_adobe_writes_it() -> None:
    found = decoded(written(photo().convert("CMYK"), "JPEG", quality=98, subsampling=0))
    assert near(corners(found), CORNERS, 4)
    assert near(corners(decoded(written(photo().convert("CMYK"), "TIFF"))), CORNERS, 1)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_transparent_pixels_are_white(kind: str) -> None:
    image = photo().convert("RGBA")
    image.putpixel((0, 0), (0, 0, 0, 0))
    image.putpixel((39, 0), (0, 0, 0, 128))
    found = decoded(written(image, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {})))
    assert corners(found) == [(255, 255, 255), (127, 127, 127), *CORNERS[2:]]


def test_a_transparent_colour_is_white() -> None:
    found = decoded(written(photo(), "PNG", transparency=(255, 0, 0)))
    assert corners(found) == [(255, 255, 255), *CORNERS[1:]]
    found = decoded(written(photo().quantize(8), "GIF", transparency=0))
    assert (255, 255, 255) in corners(found)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turned", range(1, 9))
def test_pictures_are_turned_as_exif_says(kind: str, turned: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = turned
    options = {"JPEG": {"quality": 98, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    data = written(photo(), kind, exif=exif, **options)
    upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    found = decoded(data)
    assert found.size == upright.size == ((40, 24) if turned < 5 else (24, 40))
    assert near(corners(found), corners(upright.convert("RGB")))


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [photo(), photo().transpose(Image.Transpose.ROTATE_180)]
    for kind, options in (("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
        data = written(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert near(corners(decoded(data)), CORNERS, 1), kind


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_files_that_are_cut_off_are_refused(kind: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    data = written(noise, kind, **({"compression": "tiff_lzw"} if kind == "TIFF" else {}))
    decoded(data)
    for share in (0.99, 0.8, 0.5, 0.1):
        with pytest.raises(PictureError) as failed:
            decoded(data[: int(len(data) * share) - 3])
        assert "\n" not in str(failed.value)
        if share == 0.5 and kind != "TIFF":
            assert "cut off" in str(failed.value)
    for length in range(0, 60):
        with pytest.raises(PictureError):
            decoded(data[:length])


def test_damaged_files_are_errors_of_one_line_or_pictures() -> None:
    noise = np.random.default_rng(1)
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"):
        data = written(photo(), kind)
        for _ in range(60):
            hurt = bytearray(data)
            for at in noise.integers(0, len(hurt), 3):
                hurt[at] = noise.integers(0, 256)
            try:
                image = decoded(bytes(hurt))
                assert image.width * image.height <= pictures.MOST_DECODED
            except PictureError as e:
                assert "\n" not in str(e) and len(str(e)) < 400


NOT_READ = {
    b"<svg xmlns='http://www.w3.org/2000/svg'/>": "SVG", b"<?xml version='1.0'?>\n<!-- x -->\n<svg></svg>": "SVG",
    b"\xef\xbb\xbf  <!DOCTYPE svg><svg>": "SVG", b"%PDF-1.7": "PDF", b"<!doctype html><p>": "a web page",
    b"\0\0\0\x18ftypavif" + bytes(20): "AVIF", b"\0\0\0\x18ftypheic" + bytes(20): "HEIC",
    b"\0\0\0\x18ftypisom": "a video", b"hello": "this file",
    b"8BPS\0\1": "Photoshop", b"\0\0\1\0\1\0": "ICO", b"\xff\x0a": "JPEG XL", b"II\x2b\0": "BigTIFF",
    b"RIFF\4\0\0\0WAVE": "this file", b"%!PS-Adobe": "PostScript", b"\x1f\x8b\x08": "gzip",
}  # fmt: skip


@pytest.mark.parametrize("data", NOT_READ)
def test_other_formats_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(PictureError, match=f"^{NOT_READ[data]} is not read: convert it to JPEG or PNG"):
        decoded(data)


def tiff(*entries: tuple[int, int, int, int], size: tuple[int, int] = (8, 8)) -> bytes:
    """A TIFF of tags (tag, type, count, value)."""
    own = [(256, 4, 1, size[0]), (257, 4, 1, size[1]), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8),
           (277, 3, 1, 1), (278, 4, 1, size[1]), (279, 4, 1, 64)]  # fmt: skip
    listed = sorted([*own, *entries])
    head = b"II\x2a\0" + struct.pack("<I", 72) + bytes(64)
    return head + struct.pack("<H", len(listed)) + b"".join(struct.pack("<HHII", *e) for e in listed) + bytes(4)


FRAME = bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\2\1\0\0;"

GIANTS = {
    "PNG": png(65_000, 65_000, data=zlib.compress(bytes(1000))),
    "GIF": b"GIF89a" + struct.pack("<HHBBB", 65_000, 65_000, 0x80, 0, 0) + FRAME,
    "GIF frame": b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + FRAME,
    "WebP": b"RIFF" + struct.pack("<I", 40) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xfe\x3f\0\xfe\x3f\0"
    + b"VP8 " + struct.pack("<I", 10) + bytes(10),
    "WebP animated": b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + b"\xff" * 6,
    "BMP": b"BM" + bytes(12) + struct.pack("<IiiHHI", 40, 60_000, -60_000, 1, 24, 0) + bytes(40),
    "TIFF": tiff(size=(100_000, 100_000)),
    "JPEG": written(photo(), "JPEG").replace(struct.pack(">HH", 24, 40), struct.pack(">HH", 65_500, 65_500), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", GIANTS)
def test_giants_are_refused_before_anything_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_opened", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(PictureError, match=r"more than|decoding it takes") as failed:
        decoded(GIANTS[name])
    assert "\n" not in str(failed.value)


GROWTH = """
import resource, sys
from outcore_vision.pictures import decoded
from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin
import numpy
names = sys.argv[1:]
for name in names:
    data = open(name, "rb").read()
    open("/proc/self/clear_refs", "w").write("5")
    before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    try:
        said = decoded(data).size
    except Exception as e:
        said = type(e).__name__ + ": " + str(e)
    peak = int([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]) * 1024
    print((peak - before) // 1_000_000, said)
"""


def test_a_hundred_megapixels_are_refused_where_they_cannot_be_decoded_smaller() -> None:
    with pytest.raises(
        PictureError, match=r"^PNG of 12500 x 8000 pixels: more than 40 megapixels; make it smaller, or a"
    ):
        decoded(png(12_500, 8_000, data=zlib.compress(bytes(1000))))


def growths(folder: Path, files: dict[str, bytes]) -> dict[str, tuple[int, str]]:
    """Returns by how many MB the memory of a process grows that decodes each file, and the size or the error."""
    for n, data in enumerate(files.values()):
        (folder / str(n)).write_bytes(data)
    names = [str(folder / str(n)) for n in range(len(files))]
    done = subprocess.run([sys.executable, "-c", GROWTH, *names], capture_output=True, check=True, text=True)
    found = [line.partition(" ") for line in done.stdout.splitlines()]
    return {name: (int(mb), said) for name, (mb, _, said) in zip(files, found, strict=True)}


def exif_bomb() -> bytes:
    """EXIF of 2,500 tags, each of which refers to the same 30 kB."""
    count = 2500
    entries = b"".join(struct.pack("<HHII", 0x8000 + n, 7, 30_000, 8) for n in range(count))
    return b"Exif\0\0II\x2a\0" + struct.pack("<I", 8) + struct.pack("<H", count) + entries + bytes(34_000)


def bombs() -> dict[str, bytes]:
    zeros, comment = zlib.compress(bytes(60_000_000), 1), b"!\xfe" + (b"\xff" + bytes(255)) * 20_000
    exif = exif_bomb()[:65_000]
    jpeg = written(photo(), "JPEG")
    tags = [(0x9000 + n, 7, 9_000_000, 8) for n in range(300)]
    return {
        "PNG, zTXt": png(8, 8, chunk(b"zTXt", b"x\0\0" + zeros), data=zlib.compress(bytes(200))),
        "PNG, iTXt": png(8, 8, chunk(b"iTXt", b"x\0\1\0\0\0" + zeros), data=zlib.compress(bytes(200))),
        "PNG, iCCP": png(8, 8, chunk(b"iCCP", b"x\0\0" + zeros), data=zlib.compress(bytes(200))),
        "PNG, IDAT": png(8, 8, data=zeros),
        "PNG, EXIF": png(8, 8, chunk(b"eXIf", exif[6:]), data=zlib.compress(bytes(200))),
        "JPEG, EXIF": jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:],
        "GIF, comments": b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + comment
        + b"\0,\0\0\0\0\1\0\1\0\0\2\2\x44\1\0;",
        "TIFF, tags": tiff(*tags) + bytes(9_000_000),
    }  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")
def test_bombs_take_no_memory(tmp_path: Path) -> None:
    files = bombs()
    for name, (megabytes, said) in growths(tmp_path, files).items():
        data = files[name]
        assert megabytes <= 3 * len(data) // 1_000_000 + 12, (name, megabytes, said)
        assert said[0] == "(", (name, said)  # of all of them the picture is small, and is read


def test_progressive_jpegs_are_bounded_by_what_the_decoder_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, steps = written(photo(), "JPEG"), written(photo(), "JPEG", progressive=True)
    assert header_of(plain).held == 0 < header_of(steps).held
    monkeypatch.setattr(pictures, "MOST_HELD", header_of(steps).held - 1)
    decoded(plain)
    with pytest.raises(PictureError, match=r"decoding it takes .*not progressive"):
        decoded(steps)
    at = steps.index(b"\xff\xda")
    with pytest.raises(PictureError, match="more than 100 scans"):
        decoded(steps[:at] + (b"\xff\xda\0\x08\1\1\0\0\x3f\0" + bytes(2)) * 101 + steps[at:])


def test_large_jpegs_are_decoded_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_DECODED", 40 * 24 // 3)
    found = decoded(written(photo(), "JPEG", quality=98, subsampling=0))
    assert found.size == (20, 12) and near(corners(found), CORNERS, 4)
    with pytest.raises(PictureError, match="40 x 24 pixels: more than"):
        decoded(written(photo(), "PNG"))


def test_pictures_are_made_no_larger_than_asked_for() -> None:
    for size in ((40, 24), (4000, 2), (2, 4000)):
        image = decoded(written(photo(*size), "PNG"), 500)
        assert 400 <= image.width * image.height <= 500, size
    assert decoded(written(photo(), "PNG"), 960).size == (40, 24)


def test_data_uris_and_files(tmp_path: Path) -> None:
    data = written(photo(), "PNG")
    text = base64.b64encode(data).decode()
    wanted = decoded(data).tobytes()
    (tmp_path / "a.png").write_bytes(data)
    for source in (f"data:image/png;base64,{text}", f"DATA:;base64,{text[:40]}\n{text[40:]}", str(tmp_path / "a.png"),
                   tmp_path / "a.png", data):  # fmt: skip
        assert read_picture(source).tobytes() == wanted
    for wrong, why in (("data:image/png,abc", "base64 is needed"), ("data:image/png;base64,@@", "not base64"),
                       ("data:;base64,", "empty"), (str(tmp_path), "directory|not a file"),
                       ("nothing.png", "No such file"), ("a\0b", "null"), ("/dev/zero", "not a file"),
                       ("https://a.example/", "--allow-remote-images")):  # fmt: skip
        with pytest.raises(PictureError, match=why):
            read_picture(wrong)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PictureError, match="not a file"):
        read_picture(tmp_path / "pipe")


def test_the_package_reads_without_pillow_until_there_is_a_picture() -> None:
    code = "import sys, outcore_vision.pictures; assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
