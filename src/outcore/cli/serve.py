"""``outcore serve``: answer clients of OpenAI's, Anthropic's and Ollama's APIs. Flags are ``mlx_lm.server``'s."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..decode import request_values
from ..errors import RequestError, UsageError
from ..machine.heap import share_one_heap
from ..machine.settings import setting
from ..monitoring.publisher import staying
from ..options import COUNT, LoadOptions, real, whole
from ..serve.access import Access, local_names
from ..serve.api import Defaults
from ..serve.apis import APIS
from ..serve.app import application
from ..serve.deadline import Deadline
from ..serve.events import ModelCard, Sampling, Service
from ..serve.limits import ClientLimits
from ..serve.server import Server, connections_within, listen, url
from ..serve.site import Site
from ..sizes import parse_size
from ..text import counted, half_character, one_line, shortened
from .arguments import check_max_tokens, engine_options
from .flags.serve import NOT_HERE, NOTHING_HERE
from .preset import Preset

if TYPE_CHECKING:
    from ..engine.transport import Forecast
    from ..serve.service import ServiceOptions

DAY_S = 86400.0

KEY_BYTES = 4096
"""Of a file that holds a key, at most."""


class ServedEngine(Service, Protocol):
    """What answers, until it is closed.

    Attributes:
        failure: what it cannot go on after; None: it goes on.
        forecast: what machines that share its model are predicted to take; None: there is one.
    """

    @property
    def failure(self) -> Exception | None: ...

    @property
    def forecast(self) -> Forecast | None: ...

    def close(self) -> None: ...


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    refuse(args)
    limits, defaults = limits_of(args), defaults_of(args)
    drain_s = real("--drain", args.drain, 0.0, DAY_S)
    names = names_of(args)
    ranks = getattr(args, "ranks", None)
    if ranks is not None and not ranks.serves(args, names):
        return
    share_one_heap()
    # Before anything is loaded, which takes long.
    sockets = listen(args.host, whole("--port", args.port, 0, 65535))
    began = time.monotonic()
    try:
        access = access_of(args, sockets)
        with (
            Deadline(lambda: cut(args, server)) as deadline,
            staying("serve"),
            closing(open_service(args, names)) as service,
        ):
            if service.forecast is not None:
                warn(service.forecast.line)
            room = connections_within(limits.connections)
            if room < limits.connections:
                warn(f"Note: {room} connections at once, because no more files may be open (ulimit -n)")
            site = Site(args.preset.service(service), APIS, replace(limits, connections=room), defaults)
            address = url(args.host, sockets)
            server = Server(
                application(site, access),
                site,
                drain_s,
                ready=lambda: tell(address, service.models()),
                draining=lambda count: warn(ending(count, drain_s)),
                over=lambda: service.failure is not None,
                deadline=deadline,
            )
            args.result.record |= {"url": address, "models": [card.name for card in service.models()]}
            server.run(sockets)
            args.result.record |= {"requests": site.answered, "seconds": round(time.monotonic() - began, 1)}
            if service.failure is not None:
                raise service.failure
    finally:
        for each in sockets:
            each.close()
    if signal.SIGINT in server.signals:
        if ranks is not None:
            ranks.close()  # all have ended well, whatever this one's status is
        raise KeyboardInterrupt


def tell(address: str, models: Sequence[ModelCard]) -> None:
    """Where, once it answers, in the first line: whoever started it may wait for that; and what is served."""
    print(f"Outcore answers at {address} (Ctrl-C ends it)", flush=True)
    served = ", ".join(card.name for card in models)
    print(
        f"{counted(len(models), 'model')}: {shortened(served, 200)}; OpenAI's clients ask at {address}/v1", flush=True
    )


def ending(count: int, drain_s: float) -> str:
    """What it waits for once it was asked to end."""
    return f"Ending, in {drain_s:g} s at most: {counted(count, 'request')} under way; Ctrl-C again ends them now"


def cut(args: argparse.Namespace, server: Server) -> None:
    """End the process, in the middle of what does not end in time: a part of a prompt, a model that is being loaded."""
    warn("Ended in the middle of what was under way: its time was up")
    if signal.SIGINT in server.signals:
        args.result.record |= {"error": "interrupted", "type": "KeyboardInterrupt", "exit_status": 130}
    with suppress(OSError):
        args.result.write()
        sys.stdout.flush()
    os._exit(130 if signal.SIGINT in server.signals else 0)


def refuse(args: argparse.Namespace) -> None:
    """Refuse flags of ``mlx_lm.server`` that cannot be honoured, and say which of the others mean nothing.

    Raises:
        UsageError: there is one.
    """
    for name, why in NOT_HERE.items():
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')}: not with outcore serve: {why}")
    for name, why in NOTHING_HERE.items():
        if getattr(args, name) is not None:
            warn(f"Note: --{name.replace('_', '-')} says nothing here: {why}")


def names_of(args: argparse.Namespace) -> list[str]:
    """The models to serve besides those of ``--models-folder``; the first answers requests that name none.

    Raises:
        UsageError: there is none at all.
    """
    names = [*args.models_named, *(args.model or [])]
    folder = args.models_folder
    if folder is not None and not any(folder.expanduser().glob("*/config.json")):
        raise UsageError(f"--models-folder {folder}: no folder in it has a config.json")
    if names or folder is not None:
        return list(dict.fromkeys(names))
    settled = setting("model")
    if settled is None:
        raise UsageError(
            "give a model: --model NAME, --models-folder DIR, or OUTCORE_MODEL, or the configuration file; "
            "outcore serve --help lists what there is"
        )
    return [settled.value]


def limits_of(args: argparse.Namespace) -> ClientLimits:
    """What clients may take."""
    body_bytes = parse_size(args.max_body, flag="--max-body")
    return ClientLimits(
        connections=whole("--max-connections", args.max_connections),
        body_bytes=body_bytes,
    )


def defaults_of(args: argparse.Namespace) -> Defaults:
    """What holds where a request does not say."""
    check_max_tokens(args.max_tokens)

    def number(flag: str, name: str) -> Any:
        value = getattr(args, flag)
        try:
            return request_values.number(name, value, request_values.NUMBERS[name])
        except RequestError as e:
            raise UsageError(f"--{flag.replace('_', '-')}{str(e).removeprefix(name)}") from None

    sampling = Sampling(
        temperature=float(number("temp", "temperature")),
        top_p=float(number("top_p", "top_p")),
        min_p=float(number("min_p", "min_p")),
        top_k=number("top_k", "top_k"),
    )
    most = None if args.max_tokens == -1 else args.max_tokens
    preset: Preset = args.preset
    return preset.defaults(Defaults(sampling, most, template_arguments(args)))


def template_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """``--chat-template-args``.

    Raises:
        UsageError: it is no JSON object, or has arguments that are not the user's to give.
    """
    flag = "--chat-template-args"
    try:
        return request_values.template_options(json.loads(checked_text(flag, args.chat_template_args or "{}")), flag)
    except (ValueError, RecursionError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(str(e) if isinstance(e, RequestError) else f"{flag}: not JSON: {one_line(e)}") from None


def key_of(args: argparse.Namespace) -> str | None:
    """What clients have to say; None: nothing.

    Raises:
        UsageError: it is empty, or no text.
    """
    if args.api_key is not None and args.api_key_file is not None:
        raise UsageError("--api-key-file: there is an --api-key already; give one of them")
    if args.api_key_file is not None:
        return key_in(args.api_key_file)
    key: str | None = args.api_key if args.api_key is not None else os.environ.get("OUTCORE_API_KEY") or None
    if key is not None and not checked_text("--api-key", key).strip():
        raise UsageError("--api-key: empty")
    return key


def key_in(path: Path) -> str:
    """The key that a file holds: all of its text, without white space around it.

    Raises:
        UsageError: it cannot be read, others may read it, or it holds no such text.
    """
    flag = f"--api-key-file {path}"
    try:
        with path.open("rb") as file:  # of a pipe, too, which a shell makes of <(command)
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
    """Who may ask.

    Raises:
        UsageError: others than this machine may, without a key.
    """
    key = key_of(args)
    local = all(ipaddress.ip_address(s.getsockname()[0].partition("%")[0]).is_loopback for s in sockets)
    if not local and key is None and not args.insecure:
        raise UsageError(
            f"--host {args.host}: whoever reaches this machine could ask; give --api-key-file FILE (or "
            "OUTCORE_API_KEY), or --insecure"
        )
    hosts = {name.lower() for name in listed(args.allowed_hosts)} | local_names(args.host)
    return Access(key, hosts, addresses=not local, origins=listed(args.allowed_origins))


def open_service(args: argparse.Namespace, names: Sequence[str]) -> ServedEngine:
    """The models' service, with the first of them in memory. What it is made of is slow to import, so this comes last.

    Raises:
        OutcoreError: a model cannot be opened, or not be loaded within the budget.
    """
    from ..serve.service import ModelService
    from ..serve.shelf import Shelf
    from .engine import progress_bar

    options = service_options(args)
    template = args.preset.served_template(args, names)
    shelf = Shelf(names, args.models_folder, revision=args.revision, template=template)
    if len(shelf.models) > 1:
        if args.adapter_path is not None:
            raise UsageError("--adapter-path: an adapter goes with one model; give one")
        keep_s = real("--keep-alive", args.keep_alive, -1.0, 365 * DAY_S)
        options = replace(options, keep_alive=keep_s if keep_s >= 0 else None)
    with progress_bar() as bar:
        service = ModelService(shelf, options, bar)
        try:
            asyncio.run(service.load("", None))
        except BaseException:
            service.close()
            raise
    return service


def service_options(args: argparse.Namespace) -> ServiceOptions:
    """How models are loaded and served.

    Raises:
        UsageError: flags that do not go together.
    """
    from ..serve.service import ServiceOptions
    from .engine import draft_options

    draft, drafting = draft_options(args)
    engine = engine_options(args)
    if args.decode_concurrency != 1:
        if args.kv_disk == "on":
            raise UsageError("--kv-disk on: only for one text at a time; give --decode-concurrency 1 too")
        engine["kv_disk"] = "off"
    return ServiceOptions(
        load=LoadOptions(
            **engine,
            draft=draft,
            context=args.context,
            prefill_step_size=args.prefill_step_size,
            trust_remote_code=args.trust_remote_code,
            adapter_path=args.adapter_path,
            prefix_cache=args.prefix_cache,
        ),
        max_tokens=COUNT if args.max_tokens == -1 else args.max_tokens,
        most=whole("--decode-concurrency", args.decode_concurrency),
        most_waiting=whole("--max-waiting", args.max_waiting),
        most_context=None if args.max_context is None else whole("--max-context", args.max_context),
        draft_tokens=drafting.get("num_draft_tokens"),
        secret=key_of(args),
    )


def checked_text(flag: str, text: str) -> str:
    """What was given as text, if it is.

    Raises:
        UsageError: it holds bytes that are not UTF-8.
    """
    if (at := half_character(text)) is not None:
        raise UsageError(f"{flag}: not UTF-8 text from character {at} on; convert it")
    return text


def warn(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr)


def listed(text: str) -> list[str]:
    """Names separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
