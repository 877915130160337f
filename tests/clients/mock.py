"""A server that says what a test tells it to, for what a real model cannot be made to say."""

import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGES = Path(__file__).parents[2] / "crates/server/src/pages"
HOSTILE = "Hi <b>there</b> <img src=x onerror=\"document.title='owned'\"> <script>document.title='owned'</script> & é日🙂"
CODE = "Here:\n```rust\nfn main() { println!(\"<b>{}</b>\", 1 & 2); }\n```\nand `that` is it."
MARKDOWN = (PAGES.parents[3] / "tests/clients/markdown.md").read_text()
GONE = (BrokenPipeError, ConnectionResetError)


def page(name):
    """A page as the server makes it of its files; a test holds the two against each other."""
    html, hashes = (PAGES / name).read_text(), []
    for file in sorted(re.findall(r"{{([a-z]+\.\w+)}}", html)):
        text = (PAGES / file).read_text()
        if file.endswith(".js"):
            hashes.append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        html = html.replace("{{" + file + "}}", text)
    return html.replace("{{hashes}}", " ".join(hashes))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, value, content="application/json", **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"content-type": content, "content-length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def error(self, status, message, **headers):
        body = {"error": {"message": message, "type": "x", "param": None, "code": None}}
        self.reply(status, body, **headers)

    def refused(self):
        if self.server.key and self.headers.get("authorization") != f"Bearer {self.server.key}":
            self.error(401, "Wrong API key")
            return True
        return False

    def do_GET(self):
        if self.path == "/":
            self.reply(200, page("chat.html").encode(), "text/html; charset=utf-8")
        elif not self.refused():
            self.reply(200, {"object": "list", "data": [{"id": "one"}, {"id": "two <b>"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.refused():
            return
        self.server.bodies.append(body)
        said = body["messages"][-1]["content"]
        if said == "hang up":
            self.close_connection = True
            return self.connection.close()
        if said == "full":
            return self.error(429, "The queue is full", **{"retry-after": "7"})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self.stream(said)
            self.server.ended.append(said)
        except GONE:
            self.server.ended.append("disconnected")

    def stream(self, said):
        self.chunk({"role": "assistant", "content": ""})
        if said == "forever":
            for n in range(2000):
                self.chunk({"content": f"{n} "})
                time.sleep(0.01)
        if said in ("think", "call"):
            for word in ("Let ", "me ", "**see**."):
                self.chunk({"reasoning_content": word})
        if said == "call":
            self.call(0, "weather", '{"city": "<b>Oslo</b>"}')
            self.call(1, "time", '{"zone"')
            return self.chunk({}, finish="tool_calls")
        text = {"hostile": HOSTILE, "code": CODE, "markdown": MARKDOWN}.get(said, f"You said: {said}")
        if said.startswith("echo "):
            text = said.removeprefix("echo ")
        # One byte at a time: characters, lines and frames all come in pieces.
        for at in range(0, len(text), 5):
            self.chunk({"content": text[at : at + 5]}, pieces=at < 20)
        if said == "break":
            return self.send(b'data: {"error":{"message":"The device is lost","type":"x","param":null,"code":null}}\n\ndata: [DONE]\n\n')
        self.chunk({}, finish="stop")
        self.send(b': keep-alive\n\ndata: {"choices":[],"usage":{"completion_tokens":42}}\r\n\r\ndata: [DONE]\n\n')

    def call(self, index, name, arguments):
        """A tool call in pieces, as models write them."""
        head = {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        self.chunk({"tool_calls": [{"index": index, **head}]})
        for at in range(0, len(arguments), 4):
            self.chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + 4]}}]})

    def chunk(self, delta, finish=None, pieces=False):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        data = b"data: " + json.dumps({"choices": [choice], "usage": None}, ensure_ascii=False).encode() + b"\n\n"
        if not pieces:
            return self.send(data)
        for byte in data:
            self.send(bytes([byte]))

    def send(self, data):
        self.wfile.write(data)
        self.wfile.flush()


class Mock(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, key=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.key, self.bodies, self.ended = key, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()
