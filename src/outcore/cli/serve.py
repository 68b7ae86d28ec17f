"""``outcore serve``: serves the APIs of OpenAI, Anthropic and Ollama. Flags are those of ``mlx_lm.server``."""

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
from ..serve.app import all_apis, application
from ..serve.connection import ClientLimits
from ..serve.events import Sampling
from ..serve.server import Deadline, Server, listen, url
from ..serve.site import Site
from ..text import counted, one_line, shortened
from .commands import Preset
from .flags import check_numbers, loading_options, sampling_options, template_options, text_of
from .output import tell

if TYPE_CHECKING:
    from ..serve.service import ModelService, ServiceOptions

DAY_S = 86400.0

# Seconds that an unused model stays in memory, if several are served.
KEEP_S = 300.0

KEY_BYTES = 4096


def run(args: argparse.Namespace) -> None:
    defaults = defaults_of(args)
    drain_s = real("--drain", args.drain, 0.0, DAY_S)
    names = names_of(args)
    if args.ranks is not None and not args.ranks.serves(args, names):
        return
    share_one_heap()
    began, record = time.monotonic(), args.result.record
    with ExitStack() as stack:
        # Before the model is loaded, so that a port in use is reported at once.
        sockets = listen(args.host, whole("--port", args.port, 0, 65535))
        for each in sockets:
            stack.callback(each.close)
        access = access_of(args, sockets)
        deadline = stack.enter_context(Deadline(lambda: _cut(args, server)))
        service = stack.enter_context(closing(open_service(args, names)))
        if service.forecast is not None:
            tell(service.forecast.line)
        in_base64 = [card.images["bytes"] * 4 // 3 for card in service.models() if card.images]
        limits = ClientLimits(body_bytes=max(in_base64)) if in_base64 else None
        site = Site(args.preset.service(service), all_apis(), limits, defaults)
        site.journal = tell
        address = url(args.host, sockets)
        models = [card.name for card in service.models()]

        def greet() -> None:
            # The process that started this one may wait for the first line, and its standard output is for the JSON.
            heard = sys.__stderr__ if args.json and args.quiet else None
            print(f"Outcore answers at {address} (Ctrl-C to stop)", file=heard, flush=True)
            served = f"{counted(len(models), 'model')}: {shortened(', '.join(models), 200)}"
            print(f"{served}; base URL for OpenAI clients: {address}/v1", flush=True)

        def draining(count: int) -> None:
            running = counted(count, "request")
            tell(f"Stopping within {drain_s:g} s; {running} still running (Ctrl-C again stops at once)")

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
            args.ranks.close()  # the other ranks end with status 0, unlike this one
        raise KeyboardInterrupt


def _cut(args: argparse.Namespace, server: Server) -> None:
    """Ends the process when ``--drain`` is over and a prompt or the loading of a model still runs."""
    tell("Stopped: --drain is over and a request was still running")
    interrupted = signal.SIGINT in server.signals
    if interrupted:
        args.result.record |= {"error": "interrupted", "type": "KeyboardInterrupt", "exit_status": 130}
    with suppress(OSError):
        args.result.write()
        sys.stdout.flush()
    os._exit(130 if interrupted else 0)


def names_of(args: argparse.Namespace) -> list[str]:
    """Returns the models to serve. The first one answers requests that name none."""
    return list(dict.fromkeys([*args.models_named, *(args.model or [])]))


def defaults_of(args: argparse.Namespace) -> Defaults:
    check_numbers(args)
    given = sampling_options(args)
    check_sampling(**given)
    flag, most = "--chat-template-config", None if args.max_tokens == -1 else args.max_tokens
    try:
        template = requests.template_options(template_options(args.chat_template_config), flag)
    except RequestError as e:
        raise UsageError(str(e)) from None
    preset: Preset = args.preset
    return preset.defaults(Defaults(Sampling(given.pop("temp"), **given), most, template))


def key_of(args: argparse.Namespace) -> str | None:
    """Returns the API key without surrounding white space, or None. Refuses a key file that other users can access."""
    if args.api_key_file is None:
        key = os.environ.get("OUTCORE_API_KEY") or None
        if key is not None and not text_of("OUTCORE_API_KEY", key).strip():
            raise UsageError("OUTCORE_API_KEY: empty; unset it or set it to a key")
        return key
    flag = f"--api-key-file {args.api_key_file}"
    try:
        with args.api_key_file.open("rb") as file:  # may be a pipe, as from a shell's <(command)
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"{flag}: other users can read or write it; run chmod 600 {args.api_key_file}")
            raw = file.read(KEY_BYTES + 1)
        key = raw.decode().strip()
    except OSError as e:
        raise UsageError(f"{flag}: {e.strerror or one_line(e)}") from e
    except UnicodeDecodeError:
        raise UsageError(f"{flag}: not UTF-8 text") from None
    if not key or len(raw) > KEY_BYTES or not key.isprintable():
        raise UsageError(f"{flag}: not a key; the file must hold one line of 1 to {KEY_BYTES} bytes")
    return key


def access_of(args: argparse.Namespace, sockets: Sequence[socket.socket]) -> Access:
    key = key_of(args)
    local = all(ipaddress.ip_address(s.getsockname()[0].partition("%")[0]).is_loopback for s in sockets)
    if not local and key is None and not args.insecure:
        raise UsageError(
            f"--host {args.host}: other machines could use the model without a key; give --api-key-file FILE, set "
            "OUTCORE_API_KEY, or allow it with --insecure"
        )
    hosts = {name.lower() for name in _listed(args.allowed_hosts)} | local_names(args.host)
    return Access(key, hosts, addresses=not local, origins=_listed(args.allowed_origins))


def _listed(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def open_service(args: argparse.Namespace, names: Sequence[str]) -> ModelService:
    """Starts the service and loads the first model. Its modules are imported here, as that is slow."""
    from ..serve.service import ModelService
    from ..serve.shelf import Shelf
    from .engine import ProgressBar

    options = service_options(args)
    shelf = Shelf(names, revision=args.revision, template=args.chat_template)
    if len(shelf.models) > 1:
        if args.ranks is not None:
            raise UsageError("several machines can serve only one model; give one --model")
        if args.adapter_path is not None:
            raise UsageError("--adapter-path: an adapter belongs to one model; give one --model")
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
    from .engine import draft_tokens

    # Memory for contexts is taken as requests come, so little of it is reserved.
    engine = loading_options(args) | {"priority": "speed"}
    if args.decode_concurrency != 1:
        if args.kv_disk == "on":
            raise UsageError("--kv-disk on: works for one request at a time; add --decode-concurrency 1")
        engine["kv_disk"] = "off"
    return ServiceOptions(
        load=LoadOptions(**engine, images=True),
        max_tokens=COUNT if args.max_tokens == -1 else args.max_tokens,
        most=whole("--decode-concurrency", args.decode_concurrency),
        most_context=None if args.max_context is None else whole("--max-context", args.max_context),
        draft_tokens=draft_tokens(args).get("num_draft_tokens"),
        secret=key_of(args),
        remote_images=getattr(args, "allow_remote_images", False),
    )
