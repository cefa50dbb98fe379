"""A headless Chromium, driven over a pipe by its own protocol: no driver, no port.

with Browser() as browser:
    page = browser.open("http://127.0.0.1:8000/")
    page.wait_for("document.body?.dataset.ready")
    assert page.complaints() == []
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from support.scripts import load_script

HOME: Path = load_script("install_browser").HOME
PROGRAM = HOME / "chromium"
_ANSWER_S = 120.0
_POLL_S = 0.01
_FLAGS = (
    "--headless",
    "--no-sandbox",  # tests run as root in containers, where Chromium's sandbox cannot be
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-features=Translate,MediaRouter,OptimizationHints",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",  # a page that asks elsewhere fails
    "--remote-debugging-pipe",
)


def is_installed() -> bool:
    return PROGRAM.exists()


class Browser:
    """One process, in which each page is a tab."""

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp(prefix="trivet-browser-")
        ours_out, theirs_in, theirs_out, ours_in = *os.pipe()[::-1], *os.pipe()[::-1]
        self._write, self._read = ours_out, ours_in
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(HOME / "lib"),
            "FONTCONFIG_FILE": str(HOME / "fonts.conf"),
            "HOME": self._profile,
        }
        # It reads commands from descriptor 3 and answers on 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "-", str(PROGRAM)]
        self._process = subprocess.Popen(
            [*shell, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            env=environment,
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._next = 0
        self.events: list[dict[str, Any]] = []
        """Events of every page, in order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, url: str, *, width: int = 1366, height: int = 900, scheme: str = "light") -> "Page":
        """Open a new tab, as wide as a laptop, that has begun to load `url`."""
        target = self.command("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.command("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.command(f"{domain}.enable")
        page.command(
            "Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        )
        page.command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        page.command("Page.navigate", {"url": url})
        return page

    def command(
        self, method: str, parameters: Mapping[str, Any] | None = None, *, session: str | None = None
    ) -> dict[str, Any]:
        self._next += 1
        message = {"id": self._next, "method": method, "params": dict(parameters or {})}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            for found in self._receive(deadline - time.monotonic()):
                if found.get("id") == message["id"]:
                    assert "error" not in found, f"{method}: {found['error']}"
                    return found["result"]
        raise AssertionError(f"the browser did not answer {method} in {_ANSWER_S:g} s (exit code {self._process.poll()})")

    def _receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Read all complete messages. Keep events, return answers."""
        if select.select([self._read], [], [], max(0.0, timeout_s))[0]:
            data = os.read(self._read, 1 << 20)
            assert data, f"the browser ended with exit code {self._process.wait()}"
            self._buffer += data
        *whole, self._buffer = self._buffer.split(b"\0")
        messages = [json.loads(message) for message in whole]
        self.events += [message for message in messages if "method" in message]
        return [message for message in messages if "id" in message]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def command(self, method: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.command(method, parameters, session=self._session)

    def evaluate(self, expression: str) -> Any:
        """Return the expression's value. A promise is awaited."""
        found = self.command("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait_for(self, condition: str, *, timeout_s: float = 20.0) -> Any:
        """Wait until the expression is true, and return its value. Before the page has begun, `document.body` is null: write
        `document.body?.…`."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(condition)):
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText.slice(0, 800)")
                raise AssertionError(f"waited {timeout_s:g} s for {condition}; the page says:\n{text}\n{self.complaints()}")
            time.sleep(_POLL_S)
        return value

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.command("Input.dispatchKeyEvent", {"type": "keyDown", "key": key, **text})
        self.command("Input.dispatchKeyEvent", {"type": "keyUp", "key": key})

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Send `mousePressed`, `mouseReleased` or `mouseMoved`."""
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.command("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **button})

    def complaints(self) -> list[str]:
        """Return uncaught errors and console messages above the level of information, with refusals of the security policy."""
        self.evaluate("1")  # what happened before is told before this is answered
        found: list[str] = []
        for event in self._events():
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"].get("exception", {}).get("description", parameters)))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(str([argument.get("value", argument.get("description")) for argument in parameters["args"]]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        return found

    def requested(self) -> list[str]:
        """Return the addresses that the page asked for."""
        return [event["params"]["request"]["url"] for event in self._events() if event["method"] == "Network.requestWillBeSent"]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]
