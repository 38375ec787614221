"""Drives a real browser from a test: Chromium without a window, by its DevTools protocol over two
pipes. Clicks, drags and keys are real input, not events that a script dispatches."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

from tests.which import program

SECONDS = 30  # for an answer
KEYS = {
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Delete": 46, "Tab": 9,
}  # fmt: skip


class Browser:
    """One page. `errors` has what its console and its scripts complained of."""

    def __init__(self, writes: int, reads: int) -> None:
        self.writes, self.reads = writes, reads
        self.errors: list[str] = []
        self._left, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command of the protocol."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self.writes, json.dumps(command).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            self._note(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return dict(message["result"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            if not select([self.reads], [], [], SECONDS)[0]:
                raise TimeoutError("the browser does not answer")
            if not (part := os.read(self.reads, 1 << 16)):
                raise RuntimeError("the browser has ended")
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))

    def open(self, path: Path, place: str = "") -> None:
        """Opens a file, at a place of its URL such as #ranks=3."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"file://{path}{place}")
        self.until("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Returns when an expression is true; the browser follows a link some time after a click.
        Raises TimeoutError."""
        deadline = time.monotonic() + SECONDS
        while not self.js(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has not become true: {expression}")

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return " ".join(str(self.js(f"document.querySelector({selector!r}).innerText")).split())

    def middle(self, selector: str) -> tuple[float, float]:
        """The point in the middle of an element, where it is now."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        x, y = self.js(
            f"(() => {{ const b = {box}; return [b.x + b.width/2, b.y + b.height/2] }})()"
        )
        return x, y

    def show(self, selector: str) -> tuple[float, float]:
        """The same, after it was scrolled into view."""
        self.js(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        return self.middle(selector)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Moved, Pressed or Released."""
        pressed = {"button": "left", "buttons": 1, "clickCount": 1} if kind != "Moved" else {}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **pressed)

    def click(self, selector: str) -> None:
        """Presses and releases the mouse on an element."""
        x, y = self.show(selector)
        for kind in ("Moved", "Pressed", "Released"):
            self.mouse(kind, x, y)

    def drag(self, selector: str, onto: str, dx: float = 0.0) -> None:
        """Drags an element onto the middle of another one, or `dx` pixels beside it."""
        x, y = self.show(selector)
        to = self.middle(onto)
        to = (to[0] + dx, to[1])
        self.mouse("Moved", x, y)
        self.mouse("Pressed", x, y)
        for share in (0.3, 0.7, 1.0):
            between = x + share * (to[0] - x), y + share * (to[1] - y)
            self.call("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1,
                      x=between[0], y=between[1])  # fmt: skip
        self.mouse("Released", *to)

    def touch(self, *points: tuple[float, float]) -> None:
        """A finger touches the first point, moves along the others, and leaves."""
        for k, (x, y) in enumerate(points):
            kind = "touchMove" if k else "touchStart"
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses a key; `modifiers`: 2 control, 8 shift."""
        code = KEYS.get(key, ord(key[0].upper()))
        about = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def choose(self, name: str, value: object) -> None:
        """Sets a control of the page's form, as a reader who has moved it."""
        control = f"document.querySelector('[name={name}]')"
        key = "checked" if isinstance(value, bool) else "value"
        self.js(f"{control}.{key} = {json.dumps(value)}")
        self.js(f"{control}.dispatchEvent(new Event('input', {{ bubbles: true }}))")

    def resize(self, width: int, height: int, mobile: bool = False, dark: bool = False) -> None:
        """The window, of a phone or not, and whether the reader likes it dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=mobile)  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])


@contextmanager
def browser(folder: Path, tests: str) -> Iterator[Browser]:
    """A browser whose own files are in `folder`; it has ended afterwards. Without one the test is
    skipped."""
    path = program("chromium", "google-chrome", tests=tests)
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()

    def on_three_and_four() -> None:  # where Chromium looks for them; any may be 3 or 4 already
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_there, write_there)]
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    command = [path, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
               "--hide-scrollbars", f"--user-data-dir={folder}"]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False,
        preexec_fn=on_three_and_four,
    )  # fmt: skip
    try:
        opened = Browser(write_here, read_here)
        yield opened
        opened.call("Browser.close")
        process.wait(SECONDS)
    finally:
        process.kill()  # if it has not ended by itself
        process.wait()
        for pipe in (read_here, write_there, read_there, write_here):
            os.close(pipe)
