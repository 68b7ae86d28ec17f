"""Memory and time that reading a picture takes, and which are refused.

    python benchmarks/pictures.py [--json FILE]

Each picture is read in a process of its own, which has imported all that it needs. ``peak_mb`` is by how much its
resident memory grew, the file's bytes included. Needs Pillow, and Linux's /proc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import _support  # noqa: F401
from result_file import write_result

PAGE = 4096


def photo(width: int, height: int) -> Any:
    """Something like a photo: slopes and some noise."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 24, (500, 500, 3), np.uint8)
    tile = Image.fromarray(noise + np.linspace(0, 200, 500).astype(np.uint8)[:, None, None])
    image = Image.new("RGB", (width, height))
    for x in range(0, width, 500):
        for y in range(0, height, 500):
            image.paste(tile, (x, y))
    return image


def pictures() -> Iterator[tuple[str, Any, str, dict[str, Any]]]:
    """Yields a name, a picture, and how it is written."""
    for name, size in (("24", (6000, 4000)), ("100", (12500, 8000))):
        image = photo(*size)
        yield f"JPEG {name} MP", image, "JPEG", {"quality": 80}
        yield f"JPEG {name} MP, progressive", image, "JPEG", {"quality": 80, "progressive": True}
        yield f"PNG {name} MP", image, "PNG", {"compress_level": 1}
    small = photo(4000, 4000)
    yield "WebP 16 MP", small, "WEBP", {"quality": 80, "method": 0}
    yield "PNG 16 MP, transparent", small.convert("RGBA"), "PNG", {"compress_level": 1}
    yield "JPEG 16 MP, CMYK", small.convert("CMYK"), "JPEG", {"quality": 80}
    yield "WebP 24 MP", photo(6000, 4000), "WEBP", {"quality": 60, "method": 0}


def work(path: Path) -> None:
    """Prints what reading one file takes."""
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin  # noqa: F401

    from outcore_vision.formats import PictureError
    from outcore_vision.pictures import decoded

    Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    began, found = time.process_time(), dict[str, Any]()
    try:
        image = decoded(path.read_bytes())
        found |= {"read": True, "size": list(image.size)}
    except PictureError as e:
        found |= {"read": False, "why": str(e)}
    found["processor_s"] = round(time.process_time() - began, 3)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps(found | {"peak_mb": round((int(peak.split()[1]) * 1024 - before) / 1e6, 1)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        return work(arguments.work)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, image, kind, options in pictures():
            file = Path(folder) / "picture"
            image.save(file, kind, **options)
            command = [sys.executable, __file__, "--work", str(file)]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append({"picture": name, "file_mb": round(file.stat().st_size / 1e6, 1), **row})
            print(rows[-1], flush=True)
    write_result(arguments.json, "pictures", Path(tempfile.gettempdir()), pictures=rows)


if __name__ == "__main__":
    main()
