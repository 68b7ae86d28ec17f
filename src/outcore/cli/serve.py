"""``outcore serve``: answer clients of OpenAI's, Anthropic's and Ollama's APIs. Flags are ``mlx_lm.server``'s."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ..checks import COUNT, real, whole
from ..decode.sampling import check_sampling
from ..errors import RequestError, UsageError
from ..machine.memory import share_one_heap
from ..options import LoadOptions
from ..serve import requests
from ..serve.access import Access, local_names
from ..serve.api import Defaults
from ..serve.apis import all_apis
from ..serve.app import application
from ..serve.events import Sampling
from ..serve.server import Deadline, Server, listen, url
from ..serve.site import Site
from ..text import counted, one_line, shortened
from .arguments import check_numbers, loading_options, template_options, text_of
from .output import tell
from .preset import Preset

if TYPE_CHECKING:
    from ..serve.service import ModelService, ServiceOptions

DAY_S = 86400.0

KEEP_S = 300.0
"""How long a model that nobody asks stays in memory, where there are several."""

KEY_BYTES = 4096
"""Of a file that holds a key, at most."""


def run(args: argparse.Namespace) -> None:
    defaults = defaults_of(args)
    drain_s = real("--drain", args.drain, 0.0, DAY_S)
    names = names_of(args)
    if args.ranks is not None and not args.ranks.serves(args, names):
        return
    share_one_heap()
    began, record = time.monotonic(), args.result.record
    with ExitStack() as stack:
        # Before anything is loaded, which takes long.
        sockets = listen(args.host, whole("--port", args.port, 0, 65535))
        for each in sockets:
            stack.callback(each.close)
        access = access_of(args, sockets)
        deadline = stack.enter_context(Deadline(lambda: _cut(args, server)))
        service = stack.enter_context(closing(open_service(args, names)))
        if service.forecast is not None:
            tell(service.forecast.line)
        site = Site(args.preset.service(service), all_apis(), defaults=defaults)
        address = url(args.host, sockets)
        models = [card.name for card in service.models()]

        def greet() -> None:
            # Where, in the first line: whoever started it may wait for that.
            print(f"Outcore answers at {address} (Ctrl-C ends it)", flush=True)
            served = f"{counted(len(models), 'model')}: {shortened(', '.join(models), 200)}"
            print(f"{served}; OpenAI's clients ask at {address}/v1", flush=True)

        def draining(count: int) -> None:
            tell(f"Ending, in {drain_s:g} s at most: {counted(count, 'request')} under way; Ctrl-C again ends them")

        server = Server(
            application(site, access), site, drain_s, greet, draining, lambda: service.failure is not None, deadline
        )
        record |= {"url": address, "models": models}
        server.run(sockets)
        record |= {"requests": site.answered, "seconds": round(time.monotonic() - began, 1)}
        if service.failure is not None:
            raise service.failure
    if signal.SIGINT in server.signals:
        if args.ranks is not None:
            args.ranks.close()  # all have ended well, whatever this one's status is
        raise KeyboardInterrupt


def _cut(args: argparse.Namespace, server: Server) -> None:
    """End the process, in the middle of what does not end in time: a part of a prompt, a model that is being loaded."""
    tell("Ended in the middle of what was under way: its time was up")
    interrupted = signal.SIGINT in server.signals
    if interrupted:
        args.result.record |= {"error": "interrupted", "type": "KeyboardInterrupt", "exit_status": 130}
    with suppress(OSError):
        args.result.write()
        sys.stdout.flush()
    os._exit(130 if interrupted else 0)


def names_of(args: argparse.Namespace) -> list[str]:
    """The models to serve; the first answers requests that name none."""
    return list(dict.fromkeys([*args.models_named, *(args.model or [])]))


def defaults_of(args: argparse.Namespace) -> Defaults:
    """What holds where a request does not say."""
    check_numbers(args)
    check_sampling(temp=args.temp, top_p=args.top_p, min_p=args.min_p, top_k=args.top_k)
    sampling = Sampling(
        temperature=float(args.temp), top_p=float(args.top_p), min_p=float(args.min_p), top_k=args.top_k
    )
    flag, most = "--chat-template-config", None if args.max_tokens == -1 else args.max_tokens
    try:
        template = requests.template_options(template_options(args.chat_template_config), flag)
    except RequestError as e:  # an argument that is not the user's to give
        raise UsageError(str(e)) from None
    preset: Preset = args.preset
    return preset.defaults(Defaults(sampling, most, template))


def key_of(args: argparse.Namespace) -> str | None:
    """What clients have to say, without white space around it; None: nothing. Refused where it is empty or no text, or
    lies in a file that cannot be read, or that others can."""
    if args.api_key_file is None:
        key = os.environ.get("OUTCORE_API_KEY") or None
        if key is not None and not text_of("OUTCORE_API_KEY", key).strip():
            raise UsageError("OUTCORE_API_KEY: empty")
        return key
    flag = f"--api-key-file {args.api_key_file}"
    try:
        with args.api_key_file.open("rb") as file:  # of a pipe, too, which a shell makes of <(command)
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"{flag}: others can read it, or write to it; chmod 600 it")
            raw = file.read(KEY_BYTES + 1)
        key = raw.decode().strip()
    except OSError as e:
        raise UsageError(f"{flag}: {e.strerror or one_line(e)}") from e
    except UnicodeDecodeError:
        raise UsageError(f"{flag}: not UTF-8 text") from None
    if not key or len(raw) > KEY_BYTES or not key.isprintable():
        raise UsageError(f"{flag}: one line of 1 to {KEY_BYTES} bytes is needed")
    return key


def access_of(args: argparse.Namespace, sockets: Sequence[socket.socket]) -> Access:
    """Who may ask. Refused where others than this machine may, without a key."""
    key = key_of(args)
    local = all(ipaddress.ip_address(s.getsockname()[0].partition("%")[0]).is_loopback for s in sockets)
    if not local and key is None and not args.insecure:
        raise UsageError(
            f"--host {args.host}: whoever reaches this machine could ask; give --api-key-file FILE (or "
            "OUTCORE_API_KEY), or --insecure"
        )
    hosts = {name.lower() for name in _listed(args.allowed_hosts)} | local_names(args.host)
    return Access(key, hosts, addresses=not local, origins=_listed(args.allowed_origins))


def _listed(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def open_service(args: argparse.Namespace, names: Sequence[str]) -> ModelService:
    """The models' service, with the first of them in memory. What it is made of is slow to import, so this comes
    last."""
    from ..serve.service import ModelService
    from ..serve.shelf import Shelf
    from .engine import ProgressBar

    options = service_options(args)
    template = args.preset.served_template(args, names)
    shelf = Shelf(names, revision=args.revision, template=template)
    if len(shelf.models) > 1:
        if args.ranks is not None:
            raise UsageError("one model over several machines; give a folder of one")
        if args.adapter_path is not None:
            raise UsageError("--adapter-path: an adapter goes with one model; give one")
        options = replace(options, keep_alive=KEEP_S)
    with ProgressBar() as bar:
        service = ModelService(shelf, options, bar)
        try:
            asyncio.run(service.load("", None))
        except BaseException:
            service.close()
            raise
    return service


def service_options(args: argparse.Namespace) -> ServiceOptions:
    from ..serve.service import ServiceOptions
    from .answering import draft_tokens

    # Memory for texts is taken as they come: little of it at first.
    engine = loading_options(args) | {"priority": "speed"}
    if args.decode_concurrency != 1:
        if args.kv_disk == "on":
            raise UsageError("--kv-disk on: only for one text at a time; give --decode-concurrency 1 too")
        engine["kv_disk"] = "off"
    return ServiceOptions(
        load=LoadOptions(**engine),
        max_tokens=COUNT if args.max_tokens == -1 else args.max_tokens,
        most=whole("--decode-concurrency", args.decode_concurrency),
        most_context=None if args.max_context is None else whole("--max-context", args.max_context),
        draft_tokens=draft_tokens(args).get("num_draft_tokens"),
        secret=key_of(args),
    )
