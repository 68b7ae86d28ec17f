"""The flags that this package adds to the core's commands, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from collections.abc import Mapping

from outcore.cli.commands import ArgumentParser, Command, flag, switch

COMMANDS: Mapping[str, Command] = {}
FLAGS = {name: f"outcore_vision.commands:{name}" for name in ("generate", "chat", "serve")}

REMOTE = switch("--allow-remote-images", "Fetch images from http and https addresses of the public internet.").but(
    group="images"
)


def generate(parser: ArgumentParser) -> None:
    _add(parser, "An image for the model: a file, an address, or - for standard input. Repeat it for more.")


def chat(parser: ArgumentParser) -> None:
    _add(parser, "An image for the first message: a file or an address. Repeat it for more.")


def serve(parser: ArgumentParser) -> None:
    parser.add(REMOTE)


def _add(parser: ArgumentParser, text: str) -> None:
    parser.add(flag("--image", text, action="append", metavar="FILE").but(group="images"))
    parser.add(REMOTE)
