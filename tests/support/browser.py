"""A browser without a window, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--no-default-browser-check", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-default-apps", "--no-proxy-server", "--remote-debugging-pipe",
)  # fmt: skip


def browser() -> str | None:
    """The program, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page of a browser.

    Attributes:
        violations: what its content policy refused, dialogs that opened, and exceptions that nobody caught.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._sent, self._session = to, back, b"", 0, ""
        self.violations: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 30
        while (answer := self._next(end)).get("id") != self._sent:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def run(self, script: str) -> Any:
        """What JavaScript returns; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 20.0) -> Any:
        """What JavaScript returns, once that is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"it did not come: {script}; the page: {self.run('document.body.innerText')}"
            time.sleep(0.02)
        return found

    def open(self, url: str) -> None:
        """Go there, as by typing."""
        self.run("window.left = true")
        self.call("Page.navigate", url=url)
        self.until("!window.left && document.readyState === 'complete'")

    def press(self, key: str, text: str = "", modifiers: int = 0) -> None:
        """A key, held with 1 Alt, 2 Control, 4 Meta, 8 Shift."""
        codes = {"Enter": 13, "Escape": 27, "ArrowUp": 38}
        code = codes.get(key, ord(key.upper()) if len(key) == 1 else 0)
        both: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **both)
        self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def type(self, text: str) -> None:
        """Text, where the cursor is."""
        self.call("Input.insertText", text=text)

    def window(self, width: int, height: int, scheme: str = "light") -> None:
        """Its size in pixels, and whether the system is dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """What it shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser says nothing"
            piece = os.read(self._back, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Page.javascriptDialogOpening":
            self.violations.append(f"dialog: {params['message']}")
        elif event["method"] == "Runtime.exceptionThrown":
            self.violations.append(str(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["source"] != "network":
            self.violations.append(params["entry"]["text"])


@contextmanager
def opened(program: str, folder: Path) -> Iterator[Tab]:
    """A tab of a browser with an empty profile in ``folder``, which ends with it."""
    there, to = os.pipe()
    back, from_there = os.pipe()
    command = f'exec "$0" "$@" 3<&{there} 4>&{from_there}'
    process = subprocess.Popen(
        ["bash", "-c", command, program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(there, from_there),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(there)
    os.close(from_there)
    try:
        tab = Tab(to, back)
        yield tab
        tab.call("Browser.close")
    finally:
        os.close(to)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(back)
