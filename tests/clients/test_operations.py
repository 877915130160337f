"""What curl sees of encryption, HTTP/2, sockets and the limits of keys."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import Server

TLS = Path(__file__).parents[2] / "crates/cli/tests/serve/tls"
ASK = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def has_http2():
    curl = shutil.which("curl")
    return curl and "HTTP2" in subprocess.run([curl, "--version"], capture_output=True, text=True).stdout


pytestmark = pytest.mark.skipif(not has_http2(), reason="no curl with HTTP/2")


def curl(*options, body=None):
    """Status, version of HTTP, and body."""
    command = ["curl", "--silent", "--show-error", "--max-time", "60", "--write-out", "\n%{http_code} %{http_version}", *options]
    if body is not None:
        command += ["--header", "content-type: application/json", "--data", json.dumps(body)]
    result = subprocess.run(command, capture_output=True, check=True, text=True)
    text, _, last = result.stdout.rpartition("\n")
    status, version = last.split()
    return int(status), version, text


def test_tls_and_both_versions(tmp_path):
    files = ["--tls-cert", str(TLS / "one.pem"), "--tls-key", str(TLS / "one.key")]
    # The fixture asks without encryption whether it is ready.
    probe = tmp_path / "probe"
    with Encrypted(*files, "--metrics-listen", f"unix:{probe}", probe=probe) as server:
        url = f"https://localhost:{server.port}/v1/completions"
        trust = ["--cacert", str(TLS / "one.pem")]
        for option, version in [("--http2", "2"), ("--http1.1", "1.1")]:
            status, spoken, text = curl(*trust, option, url, body=ASK)
            assert (status, spoken) == (200, version) and json.loads(text)["choices"][0]["text"]
        stranger = subprocess.run(["curl", "--silent", "--cacert", str(TLS / "two.pem"), url], capture_output=True)
        assert stranger.returncode == 60, "a certificate that nobody vouches for"


class Encrypted(Server):
    """A server whose readiness is told at an address of its own."""

    def __init__(self, *flags, probe):
        self.probe = probe
        super().__init__(*flags)

    def get(self, path, body=None, **headers):
        result = subprocess.run(["curl", "--silent", "--output", "-", "--write-out", "%{http_code}", "--unix-socket", str(self.probe), f"http://localhost{path}"], capture_output=True, text=True)
        return int(result.stdout[-3:] or 0), {}, result.stdout[:-3]


def test_http2_without_encryption(server):
    url = f"{server.url}/v1/completions"
    status, version, text = curl("--http2-prior-knowledge", url, body=ASK)
    assert (status, version) == (200, "2")
    plain = json.loads(curl(url, body=ASK)[2])
    assert json.loads(text)["choices"] == plain["choices"]
    streamed = curl("--http2-prior-knowledge", "--no-buffer", url, body={**ASK, "stream": True})[2]
    assert streamed.endswith("data: [DONE]\n\n")


def test_a_socket_of_the_file_system(tmp_path):
    socket = tmp_path / "api"
    with Server("--listen", f"unix:{socket}", "--listen", "127.0.0.1:0"):
        options = ["--unix-socket", str(socket), "http://localhost/v1/completions"]
        assert curl(*options, body=ASK)[0] == 200
        assert curl("--http2-prior-knowledge", *options, body=ASK)[:2] == (200, "2")


def test_limits_of_keys_are_openais(tmp_path):
    import openai

    keys = tmp_path / "keys"
    keys.write_text("one requests=1\n")
    with Server("--api-key-file", str(keys)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0)
        answer = client.completions.with_raw_response.create(model="ember", **ASK)
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="ember", **ASK)
        assert refused.value.code == "rate_limit_exceeded"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 61
        keys.write_text("one\n")
        server.process.send_signal(signal.SIGHUP)
        server.await_(lambda: "keys were read again" in server.output())
        assert client.completions.create(model="ember", **ASK).choices[0].text
