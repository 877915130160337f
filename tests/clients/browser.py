"""Headless Chromium by its DevTools protocol: enough to use a page as a person does."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import websocket

CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
KEYS = {"Enter": ("\r", 13), "Escape": ("", 27)}


class Browser:
    """One tab. Errors of the page (exceptions, console errors, blocked requests) gather in `errors`."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        options = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={self.profile.name}"]
        options += ["--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1100,800"]
        if os.geteuid() == 0:  # Chromium's own sandbox refuses root
            options.append("--no-sandbox")
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([CHROMIUM, *options, "about:blank"], stdout=quiet, stderr=quiet)
        self.count, self.errors, self.requests = 0, [], []
        port = self._port()
        # A browser-wide socket, then a session with a tab of our own.
        self.socket = websocket.create_connection(port, timeout=30, suppress_origin=True)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _port(self):
        file = Path(self.profile.name) / "DevToolsActivePort"
        for _ in range(300):
            lines = file.read_text().split("\n") if file.exists() else []
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            time.sleep(0.1)
        raise RuntimeError("Chromium did not start")

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            reply = json.loads(self.socket.recv())
            if reply.get("id") == self.count:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
            self._event(reply)

    def _event(self, event):
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def js(self, expression):
        """The value of an expression in the page; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, expression, seconds=30):
        """Waits until an expression is true, and gives its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.js(expression):
                return value
            time.sleep(0.03)
        raise AssertionError(f"not within {seconds} s: {expression}\n{self.js('document.body.innerText')}")

    def click(self, selector):
        box = self.js(f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                      " return [r.x + r.width / 2, r.y + r.height / 2]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, selector, text):
        self.js(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.select(); }})()")
        self.call("Input.insertText", text=text)

    def key(self, name, shift=False):
        text, code = KEYS[name]
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def pinch(self, x, y):
        """Two fingers that part, around a point."""
        self.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
        fingers = lambda apart: [{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}]
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=fingers(20))
        for apart in range(25, 100, 5):
            self.call("Input.dispatchTouchEvent", type="touchMove", touchPoints=fingers(apart))
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.call("Emulation.setTouchEmulationEnabled", enabled=False)

    def screenshot(self, path, dark=False, width=1100, height=800):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self):
        self.socket.close()
        self.process.terminate()
        self.process.wait(10)
        self.profile.cleanup()
