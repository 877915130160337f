"""A small OpenAI server for the sweep's test: server.py PORT MILLISECONDS. Ends well on SIGTERM."""
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        body = {"/v1/models": '{"data": [{"id": "fake"}]}', "/health": "{}"}.get(self.path)
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            time.sleep(int(sys.argv[2]) / 1000)
            self.wfile.write(b'data: {"choices": [{"text": "%d "}]}\n\n' % asked["prompt"][0])
        self.wfile.write(b"data: [DONE]\n\n")

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
