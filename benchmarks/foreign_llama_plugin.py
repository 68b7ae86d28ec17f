"""A pytest plugin by which llama.cpp's server tests find ``outcore serve`` (``foreign_llama.py`` runs them with it).

Their fixtures say which flags ``llama-server`` is to be started with; here the server is started with ours that mean
the same. One that is running with the same flags is taken again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

SETTINGS: dict[str, Any] = json.loads(os.environ["FOREIGN"])

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
COMMAND_R = (
    "{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|><|' + {'system': 'SYSTEM', 'user': 'USER'}.get("
    "message['role'], 'CHATBOT') + '_TOKEN|>' + message['content'] | trim + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "command-r": COMMAND_R}
"""Those that llama.cpp has by name."""

TAKES_TOOLS = "../../../models/templates/Qwen-Qwen3-0.6B.jinja"
"""Where tests have tools: llama.cpp has a form of its own for models whose template takes none, as the model here."""

KEPT = 3
"""Servers that go on running for later tests."""

running: dict[tuple[str, ...], tuple[subprocess.Popen[str], int]] = {}
folder = Path(tempfile.mkdtemp(prefix="foreign-llama-"))


os.environ["DEBUG_EXTERNAL"] = "1"
sys.path.insert(0, SETTINGS["tests"])
sys.modules.setdefault("wget", ModuleType("wget"))  # downloads models, of which there are none here


def pytest_configure() -> None:
    import utils  # type: ignore[import-not-found]
    from requests.structures import CaseInsensitiveDict  # type: ignore[import-untyped]

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.ServerProcess.start = start
    asked = utils.ServerProcess.make_request

    def make_request(wanted: Any, method: str, path: str, data: Any = None, *more: Any, **named: Any) -> Any:
        # llama-server's --verbose, which is a field of a request here, as there.
        if wanted.debug and path.endswith("/chat/completions"):
            data = {"verbose": True, **data}
        answer = asked(wanted, method, path, data, *more, **named)
        # Names of headers are in any case (RFC 9110, 5.1); ours are in small letters.
        answer.headers = CaseInsensitiveDict(answer.headers)
        return answer

    utils.ServerProcess.make_request = make_request


def pytest_unconfigure() -> None:
    for process, _ in running.values():
        process.terminate()
    for process, _ in running.values():
        process.wait(60)


def start(wanted: Any, timeout_seconds: float = 0) -> None:
    """In place of ``ServerProcess.start``."""
    flags = tuple(flags_of(wanted))
    if flags not in running or running[flags][0].poll() is not None:
        while len(running) >= KEPT:
            process, _ = running.pop(next(iter(running)))
            process.terminate()
            process.wait(60)
        running[flags] = serve(flags)
    wanted.server_port = running[flags][1]


def flags_of(wanted: Any) -> list[str]:
    """The flags of ``outcore serve`` for those of ``llama-server``; what we have none for is left out."""
    flags = ["--temp", str(wanted.temperature), "--max-tokens", str(wanted.n_predict or -1)]
    flags += ["--modelfile", str(modelfile(wanted)), "--decode-concurrency", str(wanted.n_slots or 4)]
    context = (wanted.n_ctx or 4096) // (1 if wanted.kv_unified else wanted.n_slots or 1)
    flags += ["--max-context", str(context)]
    for flag, value in (("--api-key-file", key_file(wanted)), ("--allowed-origins", origins(wanted))):
        flags += [flag, value] if value else []
    template = wanted.chat_template and TEMPLATES.get(wanted.chat_template, wanted.chat_template)
    file = wanted.chat_template_file or (TAKES_TOOLS if wanted.jinja and not template else None)
    if file:
        template = (Path(SETTINGS["tests"]) / file).read_text(encoding="utf-8")
    return flags + (["--chat-template", template] if template else [])


def key_file(wanted: Any) -> str | None:
    """A file of ours alone with the key that clients must carry."""
    if not wanted.api_key:
        return None
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(wanted.api_key)
    return file.name


def origins(wanted: Any) -> str | None:
    """Those that llama-server answers: any, unless it is told otherwise."""
    given = wanted.cors_origins or ("localhost" if wanted.server_tools else "*")
    return str(given)


def modelfile(wanted: Any) -> Path:
    """The model by the name that it is to have, with the seed."""
    named = folder / (wanted.model_alias or "model")
    if not named.exists():
        named.symlink_to(SETTINGS["model"], target_is_directory=True)
    path = folder / f"{named.name}-{wanted.seed}.modelfile"
    path.write_text(f"FROM {named}\nPARAMETER seed {wanted.seed}\n", encoding="utf-8")
    return path


def serve(flags: tuple[str, ...]) -> tuple[subprocess.Popen[str], int]:
    """A server that answers, and its port."""
    words = ["serve", "--port", "0", "--memory", SETTINGS["memory"], *SETTINGS["more"], *flags]
    log = (folder / "log.txt").open("a", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "outcore", *words], stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "answers at http" in line:
            return process, int(line.split("answers at ")[1].split()[0].rpartition(":")[2])
    raise RuntimeError(f"outcore serve ended with {process.wait()}: {(folder / 'log.txt').read_text()[-2000:]}")
