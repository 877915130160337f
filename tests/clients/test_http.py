"""Plain HTTP: what curl sees, and how the server behaves as a process."""

import json
import re
import shutil
import subprocess
import threading

import pytest
from conftest import ENDLESS, Server

ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}


def curl(url, *options, body=None):
    """Status, headers (lower case) and body, as bytes."""
    command = ["curl", "--silent", "--show-error", "--include", "--no-buffer", "--max-time", "60", *options, url]
    if body is not None:
        text = body if isinstance(body, str) else json.dumps(body)
        command += ["--header", "content-type: application/json", "--header", "expect:", "--data-binary", "@-"]
    data = None if body is None else text.encode()
    result = subprocess.run(command, input=data, capture_output=True, check=True)
    head, _, rest = result.stdout.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
    return int(first.split()[1]), headers, rest


pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="no curl")


def error_of(body):
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert all(error[key] is None or isinstance(error[key], str) for key in ("param", "code"))
    return error


def test_curl(server, model):
    status, headers, body = curl(f"{server.url}/v1/chat/completions", body={"model": model, **ASK})
    assert status == 200 and headers["content-type"].startswith("application/json")
    answer = json.loads(body)
    assert answer["choices"][0]["message"]["content"] and answer["choices"][0]["logprobs"] is None
    assert set(answer["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details"}


def test_curl_streams(server, model):
    status, headers, body = curl(f"{server.url}/v1/chat/completions", body={"model": model, "stream": True, **ASK})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert "no-cache" in headers.get("cache-control", "")
    frames = [f for f in body.decode().split("\n\n") if f and not f.startswith(":")]
    assert all(f.startswith("data: ") and "\n" not in f for f in frames) and frames[-1] == "data: [DONE]"
    assert body.endswith(b"data: [DONE]\n\n")
    chunks = [json.loads(f[6:]) for f in frames[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {} and chunks[-1]["choices"][0]["finish_reason"]
    assert all(set(c["choices"][0]["delta"]) == {"content"} and c["choices"][0]["delta"]["content"] for c in chunks[1:-1])


def test_request_ids(server, model):
    given = curl(f"{server.url}/v1/models", "--header", "x-request-id: abc-123")[1]
    assert given["x-request-id"] == "abc-123"
    made = [curl(f"{server.url}/{path}")[1]["x-request-id"] for path in ("v1/models", "v1/models", "nowhere")]
    assert all(made) and len(set(made)) == 3


@pytest.mark.parametrize("body", ["", "{", "[]", "null", "\"x\"", "{}", '{"messages": 3}', '{"messages": []', "\x00", '{"messages": [{"role": 1}]}'])
def test_malformed(server, body):
    status, _, answer = curl(f"{server.url}/v1/chat/completions", body=body)
    assert status == 400, answer
    error_of(answer)


def test_messages_that_say_nothing(server, model):
    for messages in ([], [{}], [{"role": "user"}], [{"content": "x"}]):
        status, _, answer = curl(f"{server.url}/v1/chat/completions", body={"model": model, "messages": messages})
        assert status in (400, 422), (messages, answer)
        error_of(answer)


def test_other_refusals(server, model):
    status, _, body = curl(f"{server.url}/nowhere")
    assert status == 404 and error_of(body)
    status, headers, body = curl(f"{server.url}/v1/chat/completions")
    assert status == 405 and "POST" in headers["allow"] and error_of(body)
    status, _, body = curl(f"{server.url}/v1/completions", body={"model": model, "prompt": "x" * (9 << 20)})
    assert status == 413 and error_of(body)
    deep = '{"model": "m", "messages": ' + "[" * 100000 + "]" * 100000 + "}"
    assert curl(f"{server.url}/v1/chat/completions", body=deep)[0] == 400
    status, _, body = curl(f"{server.url}/v1/chat/completions", "--header", "content-encoding: gzip", body={"model": model, **ASK})
    assert status < 500
    assert server.get("/health")[0] == 200


def test_tokens_and_back(server, model):
    text = "The cat's naïve 日本 🙂\n"
    tokens = server.json("/tokenize", {"model": model, "prompt": text})
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] >= 128
    bare = server.json("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})["tokens"]
    assert server.json("/detokenize", {"model": model, "tokens": bare})["prompt"] == text
    chat = server.json("/tokenize", {"model": model, "messages": ASK["messages"]})
    asked = server.json("/v1/chat/completions", {"model": model, **ASK})
    assert chat["count"] == asked["usage"]["prompt_tokens"]
    for tokens in ([10**9], [-1], ["x"]):
        assert server.get("/detokenize", {"model": model, "tokens": tokens})[0] in (400, 422)


def test_the_last_message_is_gone_on_with(server, model):
    begun = [*ASK["messages"], {"role": "assistant", "content": "Once upon"}]
    def tokens(messages, **options):
        return server.json("/tokenize", {"model": model, "messages": messages, **options})["tokens"]
    text = server.json("/detokenize", {"model": model, "tokens": tokens(begun, continue_final_message=True)})["prompt"]
    assert text.endswith("Once upon")
    assert len(tokens(begun, add_generation_prompt=False)) > len(tokens(begun, continue_final_message=True))
    answer = server.json("/v1/chat/completions", {**ASK, "model": model, "messages": begun, "continue_final_message": True})
    assert answer["usage"]["prompt_tokens"] == len(tokens(begun, continue_final_message=True))
    both = {"continue_final_message": True, "add_generation_prompt": True}
    for wrong, status in (({"messages": begun, **both}, 422), ({"messages": [{**begun[-1], "content": None}], "continue_final_message": True}, 400)):
        assert server.get("/v1/chat/completions", {**ASK, "model": model, **wrong})[0] == status


def test_pages(server):
    status, headers, body = curl(f"{server.url}/")
    assert status == 200 and headers["content-type"].startswith("text/html") and b"<title>Infernum" in body
    assert server.json("/version")["version"]
    assert curl(f"{server.url}/docs")[0] == 200
    document = server.json("/openapi.json")
    assert document["openapi"].startswith("3.") and "/v1/chat/completions" in document["paths"]


def test_metrics(server, model):
    before = {n: server.metric(n, model_name=model) for n in ("prompt_tokens_total", "generation_tokens_total", "request_success_total")}
    usage = server.json("/v1/chat/completions", {"model": model, **ASK, **ENDLESS})["usage"]
    server.until_idle()
    after = {n: server.metric(n, model_name=model) for n in before}
    grown = {n: after[n] - before[n] for n in before}
    assert grown == {"prompt_tokens_total": usage["prompt_tokens"], "generation_tokens_total": 12, "request_success_total": 1}
    text = server.get("/metrics")[2]
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert re.search(rf'^infernum:{name}_seconds_bucket{{.*le="\+Inf".*}} [1-9]', text, re.M), name
    for name in ("prefix_cache_hits_total", "prefix_cache_queries_total", "cache_config_info"):
        assert f"infernum:{name}{{" in text
    assert 'finished_reason="length"' in text and "block_size=" in text


def test_the_prefix_cache_is_seen(server, model):
    body = {"model": model, "prompt": "A long beginning that two requests share, word for word. " * 20, "max_tokens": 2, "temperature": 0}
    first, second = server.json("/v1/completions", body), server.json("/v1/completions", body)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


def test_every_route_but_health_wants_the_key(keyed):
    paths = ["/", "/docs", "/openapi.json", "/version", "/metrics", "/v1/models", "/v1/models/x", "/nowhere"]
    assert {path: keyed.get(path)[0] for path in paths} == dict.fromkeys(paths, 401)
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert keyed.get(path, ASK)[0] == 401 and keyed.get(path, ASK, authorization="Bearer secret-3")[0] == 401
    assert keyed.get("/health")[0] == 200
    assert keyed.get("/version", authorization="Bearer secret-1")[0] == 200
    assert "secret-1" not in keyed.output()


def test_other_origins():
    with Server("--cors-origin", "https://app.example") as server:
        preflight(server)


def preflight(server):
    ask = ["--request", "OPTIONS", "--header", "access-control-request-method: POST", "--header", "access-control-request-headers: authorization,content-type"]
    allowed = curl(f"{server.url}/v1/chat/completions", *ask, "--header", "origin: https://app.example")
    assert allowed[0] in (200, 204) and allowed[1]["access-control-allow-origin"] == "https://app.example"
    other = curl(f"{server.url}/v1/chat/completions", *ask, "--header", "origin: https://evil.example")
    assert other[1].get("access-control-allow-origin") != "https://evil.example"


def stream(server, model, tokens):
    """A curl that streams, its first bytes read."""
    body = {"model": model, **ASK, "max_tokens": tokens, "stream": True, **ENDLESS}
    command = ["curl", "--silent", "--no-buffer", f"{server.url}/v1/chat/completions", "--header", "content-type: application/json", "--data", json.dumps(body)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"data: ")
    return process


def test_a_disconnect_frees(server, model):
    streams = [stream(server, model, 1500) for _ in range(8)]
    assert server.metric("num_requests_running") >= 1 and server.metric("kv_cache_usage_perc") > 0
    for process in streams:
        process.kill()
        process.wait()
    server.until_idle(5)


def test_sigterm_drains():
    with Server() as server:
        process = stream(server, server.model, 400)
        # Leaving the block sends SIGTERM, and asks for exit code 0.
        output = []
        reader = threading.Thread(target=lambda: output.append(process.stdout.read().decode()))
        reader.start()
    reader.join(10)
    assert output[0].endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in output[0], "a running stream ends as it would"
    assert process.wait(10) == 0
    assert server.get("/health")[0] == 0, "nothing listens any more"


def test_settings_come_from_a_file_and_the_environment(tmp_path):
    file = tmp_path / "infernum.toml"
    file.write_text('api-key = ["from-file"]\nmax-sequences = 2\nqueue = 3\n')
    with Server("--config", str(file), INFERNUM_MAX_LENGTH="300") as server:
        assert server.get("/v1/models")[0] == 401
        assert server.json("/v1/models", authorization="Bearer from-file")["data"][0]["max_model_len"] == 300
