"""A server on the built-in model, for as long as the tests want it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI

BINARY = os.environ.get("INFERNUM_BIN", str(Path(__file__).parents[2] / "target/debug/infernum"))
# Makes an answer as long as it may be.
ENDLESS = {"ignore_eos": True}


class Server:
    """`infernum serve` with some flags. Its log is shown where it does not start or dies."""

    def __init__(self, *flags, **env):
        self.log = tempfile.TemporaryFile("w+")
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name) / "port"
        command = [BINARY, "serve", "--host", "127.0.0.1", "--port", "0", "--port-file", str(file), *flags]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env={**os.environ, **env})
        self.await_(file.exists)
        self.port = int(file.read_text())
        self.url = f"http://127.0.0.1:{self.port}"
        self.await_(lambda: self.get("/health")[0] == 200)

    def await_(self, ready):
        end = time.monotonic() + 120
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise RuntimeError(f"{self.process.args}: {self.process.poll()}\n{self.output()}")
            time.sleep(0.05)

    def output(self):
        self.log.seek(0)
        return self.log.read()

    def get(self, path, body=None, **headers):
        """Status, headers and text; status 0 where nothing listens."""
        data = None if body is None else json.dumps(body).encode()
        if data:
            headers = {"content-type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, data, {k.replace("_", "-"): v for k, v in headers.items()})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.headers, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()
        except OSError:
            return 0, {}, ""

    def json(self, path, body=None, **headers):
        status, _, text = self.get(path, body, **headers)
        assert status == 200, f"{path}: {status} {text}"
        return json.loads(text)

    @property
    def model(self):
        return self.json("/v1/models")["data"][0]["id"]

    def metric(self, name, **labels):
        """The sum of a metric over what labels are left open."""
        text = self.get("/metrics")[2]
        found = re.findall(rf"^infernum:{name}(?:{{(.*)}})? (\S+)$", text, re.M)
        assert found, f"no metric {name}"
        want = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for given, value in found if all(w in given for w in want))

    def until_idle(self, seconds=20):
        """Waits until no request and no block of the KV cache is held."""
        names = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
        end = time.monotonic() + seconds
        while any(values := [self.metric(name) for name in names]):
            assert time.monotonic() < end, f"still held after {seconds} s: {dict(zip(names, values))}"
            time.sleep(0.05)

    def rss(self):
        """Resident memory in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        """It ends well: drained, with nothing said that should not be. After a failure it just ends."""
        try:
            if kind is None:
                assert self.process.poll() is None, self.output()
                assert self.stop() == 0, self.output()
                assert "panicked" not in self.output(), self.output()  # "panic" may be part of an id
        finally:
            self.process.kill()

    def stop(self):
        """Ends it as an init system does; gives the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def engine_apart(*flags):
    """An engine in a process of its own: gives the flags of a server that asks it."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        address = f"ipc://{folder}/engine"
        process = subprocess.Popen([BINARY, "engine", "--listen", address, *flags], stdout=log, stderr=log)
        try:
            yield ["--engine", address]
            assert process.poll() is None, "the engine has ended"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            log.seek(0)
            said = log.read()
        assert "panicked" not in said, said


def pytest_addoption(parser):
    parser.addoption("--heavy", action="store_true", help="run the tests that take minutes, too")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--heavy"):
        skip = pytest.mark.skip(reason="heavy: needs --heavy")
        for item in items:
            if "heavy" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def server():
    with Server() as server:
        yield server


@pytest.fixture(scope="session")
def keyed():
    """A server that wants a key."""
    with Server("--api-key", "secret-1", "--api-key", "secret-2") as server:
        yield server


ROOT = Path(__file__).parents[2]
# Its calls are JSON between markers; its answers begin with thoughts where its prompt says so.
TEMPLATES = {"caller": "Qwen-Qwen3-0.6B", "thinker": "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"}


@pytest.fixture(scope="session")
def callers(tmp_path_factory):
    """The demo's weights under templates that know calls and reasoning."""
    flags = []
    for name, template in TEMPLATES.items():
        folder = tmp_path_factory.mktemp(name)
        for file in (ROOT / "models/demo").iterdir():
            if file.is_file():
                shutil.copy(file, folder)
        shutil.copy(ROOT / f"tests/fixtures/chat-templates/templates/{template}.jinja", folder / "chat_template.jinja")
        flags += ["--model", f"{name}={folder}"]
    with Server(*flags) as server:
        yield server


PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age"],
          "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}}
WEATHER = {"type": "object", "additionalProperties": False, "required": ["city"],
           "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}}}


def until_called(ask, tries=8):
    """The first answer of some seeds that ends with a call: weights that know nothing of them may go on instead."""
    for seed in range(tries):
        if answer := ask(seed):
            return seed, answer
    raise AssertionError(f"none of {tries} answers is a call")


@pytest.fixture(scope="session")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def model(server):
    return server.model
