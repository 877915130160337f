"""Models of a hub: what Hugging Face's own package downloads is found, and the other way round."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import BINARY

DEMO = Path(__file__).parents[2] / "models/demo"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {file.name: file.read_bytes() for file in DEMO.iterdir() if file.is_file()}
INFO = {"_id": "1", "id": "org/name", "sha": COMMIT, "private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}


def etag(data):
    if len(data) > 100_000:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        self.server.seen.append(f"{self.command} {self.path}")

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"content_length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        name = path.rpartition("/")[2]
        if "/tree/" in path:
            tree = [{"type": "file", "oid": etag(data), "size": len(data), "path": name} for name, data in FILES.items()]
            self.answer(200, json.dumps(tree).encode(), content_type="application/json")
        elif path.startswith("/api/models/org/name"):
            info = {**INFO, "siblings": [{"rfilename": name} for name in FILES]}
            self.answer(200, json.dumps(info).encode(), content_type="application/json")
        elif "/resolve/" in path and name in FILES:
            self.answer(200, FILES[name], etag=f'"{etag(FILES[name])}"', x_repo_commit=COMMIT)
        else:
            self.answer(404, x_error_code="EntryNotFound")

    do_HEAD = do_GET


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def run(command, hub, home, **more):
    plain = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    env = {**plain, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home), **more}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


GENERATE = [BINARY, "generate", "--model", "org/name", "--max-tokens", "8", "Once upon a time"]
DOWNLOAD = "from huggingface_hub import snapshot_download, scan_cache_dir; print(snapshot_download('org/name')); assert not scan_cache_dir().warnings"


def test_what_infernum_downloads_python_finds(hub, tmp_path):
    assert run(GENERATE, hub, tmp_path).startswith("Once upon a time")
    folder = run([sys.executable, "-c", DOWNLOAD], hub, tmp_path, HF_HUB_OFFLINE="1").strip()
    assert {file.name: file.read_bytes() for file in Path(folder).iterdir()} == FILES


def test_what_python_downloads_infernum_finds(hub, tmp_path):
    run([sys.executable, "-c", DOWNLOAD], hub, tmp_path)
    hub.seen.clear()
    told = run(GENERATE, hub, tmp_path)
    assert hub.seen == ["GET /api/models/org/name/revision/main"], "nothing is downloaded twice"
    assert run(GENERATE, hub, tmp_path, HF_HUB_OFFLINE="1") == told
