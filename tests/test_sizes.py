from __future__ import annotations

import pytest

from outcore.checks import parse_size
from outcore.errors import UsageError
from outcore.sizes import format_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1.5GB", 1_500_000_000),
        ("512MiB", 512 * 2**20),
        ("800 MB", 800_000_000),
        ("2g", 2_000_000_000),
        ("4G", 4_000_000_000),
        ("3M", 3_000_000),
        ("7K", 7_000),
        ("1T", 10**12),
        ("1tib", 2**40),
        ("0.1 KiB", 102),
        (".5GB", 500_000_000),
        ("1.GB", 1_000_000_000),
        ("+1GB", 1_000_000_000),
        ("  64kb ", 64_000),
        ("17B", 17),
        ("1.66GB", 1_660_000_000),  # 1.66 * 1e9 in floats is a byte short on some platforms
    ],
)
def test_sizes_are_read_exactly(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("4", "no unit; write 4GB or 4GiB"),
        ("1.5", "no unit; write 1.5GB or 1.5GiB"),
        ("0GB", "at least one byte"),
        ("0.4B", "at least one byte"),
        ("-1GB", "cannot be negative"),
        ("-4", "cannot be negative"),
        ("nan", "not a size"),
        ("NaNGB", "not a size"),
        ("infGB", "not a size"),
        ("", "not a size"),
        ("   ", "not a size"),
        ("GB", "not a size"),
        ("1,5GB", "not a size"),
        ("1e9B", "not a size"),
        ("1 2GB", "not a size"),
        ("four GB", "not a size"),
        ("٤GB", "not a size"),
        ("4GBs", "unknown unit GBs"),
        ("4Gb/s", "not a size"),
        ("4GB\n5GB", "not a size"),
        ("4PB", "unknown unit PB"),
        ("99999999999TB", "smaller size"),
        ("9" * 5000 + "GB", "not a size"),
    ],
)
def test_what_is_not_a_size_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    message = str(caught.value)
    assert message.startswith("--memory ")
    assert reason in message
    assert "\n" not in message and len(message) < 250


def test_the_error_names_the_flag_it_was_typed_for() -> None:
    with pytest.raises(UsageError, match=r"^--kv-disk-size 4: no unit"):
        parse_size("4", flag="--kv-disk-size")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (131_000_000, "131 MB"),
        (1_660_000_000, "1.66 GB"),
        (16_600_000_000, "16.6 GB"),
        (9_994_000_000, "9.99 GB"),
        (9_999_000_000, "10.0 GB"),
        (99_990_000_000, "100 GB"),
        (999_900_000, "1.00 GB"),
        (999_400_000, "999 MB"),
        (5 * 10**15, "5000 TB"),
        (-1_660_000_000, "-1.66 GB"),
    ],
)
def test_sizes_are_written_with_three_digits(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize("nbytes", [1, 999, 1001, 1_661_000_001, 9_991_000_000, 999_000_001, 123_456_789_012])
def test_a_size_rounded_up_is_enough_when_typed_back(nbytes: int) -> None:
    assert nbytes <= parse_size(format_size(nbytes, round_up=True)) <= nbytes * 1.01
