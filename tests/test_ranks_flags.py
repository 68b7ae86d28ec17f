"""What ranks are told to do: all of them the same."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from memory_link import memory_links
from outcore.errors import UsageError
from outcore_cluster.launch.as_rank import check_same
from outcore_cluster.link_protocol import Link


def told(*given: dict[str, Any]) -> list[str]:
    """What each of some ranks says; nothing where it goes on."""

    def one(link: Link, flags: dict[str, Any]) -> str:
        try:
            check_same(link, flags.pop("command", "generate"), argparse.Namespace(**flags))
        except UsageError as e:
            return str(e)
        return ""

    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(one, memory_links(len(given), 10.0), map(dict, given)))


def test_ranks_with_the_same_flags_go_on() -> None:
    assert told({"kv_bits": 4, "memory": "1GB"}, {"kv_bits": 4, "memory": "2GB"}, {"kv_bits": 4}) == ["", "", ""]


def test_a_flag_or_a_command_that_differs_is_refused_on_every_rank() -> None:
    found = set(told({"kv_bits": 4}, {"kv_bits": 4}, {"kv_bits": 8}))
    assert found == {"--kv-bits: [4, 4, 8] on ranks 0 to 2; give each the same"}
    assert set(told({}, {"command": "chat"})) == {"command: ['generate', 'chat'] on ranks 0 to 1; give each the same"}
