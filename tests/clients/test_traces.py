"""Traces of requests, as a collector of OpenTelemetry receives them: protobuf over HTTP."""

import json
import os
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import Server

ASK = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def fields(data):
    """What a message of protobuf holds: its fields by number, each a list of bytes or whole numbers."""
    found, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            value, at = data[at:at + size], at + size
        found.setdefault(number, []).append(value)
    return found


def any_value(data):
    [(number, [value])] = fields(data).items()
    match number:
        case 1: return value.decode()
        case 3: return value
        case 4: return struct.unpack("<d", value)[0]
        case 5: return [any_value(v) for v in fields(value).get(1, [])]


def attributes(pairs):
    pairs = [fields(pair) for pair in pairs]
    return {pair[1][0].decode(): any_value(pair[2][0]) for pair in pairs}


def spans(data):
    """All spans of a request to a collector, with the attributes of their resource."""
    for resource in fields(data)[1]:
        resource = fields(resource)
        service = attributes(fields(resource[1][0])[1])
        for scope in resource[2]:
            for span in map(fields, fields(scope)[2]):
                start, end = (struct.unpack("<Q", span[i][0])[0] for i in (7, 8))
                yield {
                    "trace": span[1][0].hex(), "id": span[2][0].hex(), "parent": span.get(4, [b""])[0].hex(), "name": span[5][0].decode(),
                    "kind": span[6][0], "start": start, "end": end, "attributes": attributes(span.get(9, [])),
                    "status": fields(span[15][0]).get(3, [0])[0] if 15 in span else 0, "resource": service,
                }


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it is sent, or takes none and answers nothing."""

    daemon_threads = True

    def __init__(self, away=False):
        self.spans, self.paths, self.away = [], [], away
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.away:
            time.sleep(60)
        self.server.paths.append((self.path, self.headers["content-type"], self.headers["x-tenant"]))
        self.server.spans += spans(body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def traced(collector, *flags, **env):
    try:
        return Server("--otlp-endpoint", collector.url, *flags, **env)
    except RuntimeError as error:
        if "infernum-cli/otlp" in str(error) and not os.environ.get("INFERNUM_NEEDS_TRACES"):
            pytest.skip("a build without traces")
        raise


def test_a_request_is_a_span_with_its_parts():
    collector = Collector()
    env = {"OTEL_SERVICE_NAME": "tales", "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=one"}
    with traced(collector, **env) as server:
        model = server.model
        parent = f"00-{TRACE}-{PARENT}-01"
        answer = server.json("/v1/completions", ASK, traceparent=parent)
        server.json("/v1/completions", ASK, traceparent=f"00-{TRACE}-{PARENT}-00")
        server.json("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "n": 2})
        server.await_(lambda: len(collector.spans) >= 8)
        assert server.get("/v1/completions", {**ASK, "max_tokens": -1})[0] == 422, "what is refused is no request"
    # What was left was sent as the server ended: of the request that its caller does not record, nothing.
    assert len(collector.spans) == 8, [span["name"] for span in collector.spans]
    assert set(collector.paths) == {("/v1/traces", "application/x-protobuf", "one")}
    assert all(span["resource"]["service.name"] == "tales" for span in collector.spans)
    whole, other = [span for span in collector.spans if span["kind"] == 2]
    parts = [span for span in collector.spans if span["parent"] == whole["id"]]
    assert (whole["trace"], whole["parent"], whole["name"]) == (TRACE, PARENT, f"text_completion {model}")
    assert [part["name"] for part in parts] == ["queue", "prefill", "decode"]
    assert all(part["trace"] == TRACE for part in parts)
    assert parts[0]["start"] == whole["start"] and parts[-1]["end"] == whole["end"]
    assert all(a["end"] == b["start"] for a, b in zip(parts, parts[1:]))
    assert abs(whole["end"] / 1e9 - time.time()) < 120
    found = whole["attributes"]
    assert found["gen_ai.operation.name"] == "text_completion" and found["gen_ai.request.model"] == model
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 8
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    # Without a caller's it is a trace of its own.
    assert other["parent"] == "" and other["trace"] not in (TRACE, "0" * 32)
    assert other["name"] == f"chat {model}" and len(other["attributes"]["gen_ai.response.finish_reasons"]) == 2


def test_a_collector_that_is_away_costs_nobody_anything():
    collector = Collector(away=True)
    with traced(collector) as server:
        start = time.monotonic()
        for _ in range(4):
            server.json("/v1/completions", ASK)
        assert time.monotonic() - start < 30
        # The collector has ten seconds for each batch.
        server.await_(lambda: server.metric("traces_dropped_total") >= 1)
        assert "traces are lost" in server.output()


def test_nothing_is_sent_where_nobody_asked(server):
    assert server.metric("traces_dropped_total") == 0
