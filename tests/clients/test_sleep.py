"""What operators do with a server that nobody asks: it sleeps, gives its memory back, and wakes as it was."""

import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest
from conftest import BINARY, ENDLESS, Server
from test_adapters import DEMO, text, write_adapter

PROMPT = "Once upon a time there was a fox. "
ASK = {"prompt": PROMPT * 8, "max_tokens": 8, "temperature": 0}


def post(server, path):
    """Status and body of a POST without a body, as vLLM's clients send it."""
    request = urllib.request.Request(server.url + path, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def code(answer):
    return json.loads(answer[-1])["error"]["code"]


def sleeping(server):
    return server.json("/is_sleeping")["is_sleeping"]


def answer(server, **more):
    return server.json("/v1/completions", {**ASK, **more})


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model like the demo with 64 KiB of cache a token, and random weights."""
    folder = tmp_path_factory.mktemp("wide")
    for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(DEMO / file, folder)
    config = json.loads((DEMO / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_answers_are_as_before(wide, level):
    with Server("--model", str(wide), "--random-weights", "--kv-tokens", "4096") as server:
        before = answer(server)
        assert answer(server)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        answer(server, prompt=[[7 + i] * 64 for i in range(10)], max_tokens=1)
        steps = server.metric("prefix_cache_queries_total")
        awake = server.rss()
        assert not sleeping(server) and post(server, f"/sleep?level={level}") == (200, "")
        assert sleeping(server)
        asleep = server.rss()
        assert awake - asleep > 35, "what was written of the cache is 40 MiB"
        for path in ["/health", "/readyz"]:
            status, headers, body = server.get(path)
            assert status == 503 and headers["retry-after"] and code([body]) == "model_sleeping"
        assert server.get("/livez")[0] == 200
        assert server.json("/tokenize", {"prompt": "fox"})["count"], "what needs no engine is answered"
        for path, body in [("/v1/completions", ASK), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})]:
            status, headers, body = server.get(path, body)
            assert status == 503 and headers["retry-after"] and code([body]) == "model_sleeping"
        assert post(server, "/sleep") == (200, ""), "it sleeps already"
        assert post(server, "/wake_up") == (200, "")
        assert not sleeping(server) and server.get("/readyz")[0] == 200
        after = answer(server)
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "the cache is empty"
        assert server.metric("prefix_cache_queries_total") > steps, "counters count on"
        assert post(server, "/wake") == (200, ""), "it is awake"


def running(server):
    """A request that goes on for seconds, so that calls reach it in time, on a thread of its own, and what it is answered."""
    answered = []
    body = {**ASK, **ENDLESS, "max_tokens": 1000}
    thread = threading.Thread(target=lambda: answered.append(server.get("/v1/completions", body)))
    thread.start()
    server.await_(lambda: server.metric("num_requests_running") == 1)
    return thread, answered


def test_what_runs_ends_first_or_is_ended():
    with Server() as server:
        thread, answered = running(server)
        slept = []
        sleeper = threading.Thread(target=lambda: slept.append(post(server, "/sleep")))
        sleeper.start()
        server.await_(lambda: sleeping(server))
        assert code(server.get("/v1/completions", ASK)) == "model_sleeping", "nothing new is taken meanwhile"
        sleeper.join(60)
        thread.join(60)
        assert slept == [(200, "")]
        status, _, body = answered[0]
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 1000
        assert post(server, "/wake_up")[0] == 200

        thread, answered = running(server)
        sleeper = threading.Thread(target=lambda: slept.append(post(server, "/sleep?mode=wait")))
        sleeper.start()
        server.await_(lambda: sleeping(server))
        assert post(server, "/sleep?mode=abort&level=2") == (200, "")
        thread.join(10)
        sleeper.join(10)
        assert slept[1] == (200, "")
        assert answered[0][0] == 503 and code(answered[0]) == "model_sleeping"
        assert server.metric("num_requests_running") == 0
        assert post(server, "/wake_up")[0] == 200

        # Whoever waits for the sleep hears that it does not come.
        thread, answered = running(server)
        sleeper = threading.Thread(target=lambda: slept.append(post(server, "/sleep")))
        sleeper.start()
        server.await_(lambda: sleeping(server))
        assert post(server, "/wake_up") == (200, "")
        sleeper.join(10)
        assert slept[2][0] == 503 and code(slept[2]) == "sleep_ended"
        thread.join(60)
        assert answered[0][0] == 200


def test_it_is_said_what_cannot_be(keyed):
    for path in ["/sleep", "/wake_up", "/wake"]:
        assert post(keyed, path)[0] == 401
    key = {"authorization": "Bearer secret-1"}
    for path, param in [("/sleep?level=0", "level"), ("/sleep?level=x", "level"), ("/sleep?mode=keep", "mode"), ("/wake_up?tags=weights", "tags"), ("/sleep?model=no", "model")]:
        request = urllib.request.Request(keyed.url + path, method="POST", headers=key)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == (404 if param == "model" else 422)
        assert json.loads(refused.value.read())["error"]["param"] == param
    assert keyed.json("/is_sleeping", **key) == {"is_sleeping": False}


def test_models_sleep_alone():
    with Server("--model", "one=demo", "--model", "two=demo") as server:
        assert post(server, "/sleep?model=one") == (200, "")
        assert sleeping(server) and not server.json("/is_sleeping?model=two")["is_sleeping"]
        assert code(server.get("/v1/completions", {**ASK, "model": "one"})) == "model_sleeping"
        assert server.get("/readyz")[0] == 503
        assert answer(server, model="two")["choices"]
        assert post(server, "/wake") == (200, "")
        assert answer(server, model="one")["choices"]


def test_adapters_survive(tmp_path):
    for seed, name in enumerate(["gone", "named", "loaded"]):
        write_adapter(tmp_path / name, seed)
    with Server("--lora", f"named={tmp_path / 'named'}", "--lora-root", str(tmp_path)) as server:
        load = lambda name: server.get("/v1/load_lora_adapter", {"lora_name": name, "lora_path": name})[0]
        assert load("gone") == 200 and load("loaded") == 200
        assert server.get("/v1/unload_lora_adapter", {"lora_name": "gone"})[0] == 200
        names = [server.model, "named", "loaded"]
        before = [text(server, name) for name in names]
        assert len(set(before)) == 3
        for level in [1, 2]:
            assert post(server, f"/sleep?level={level}") == (200, "")
            assert code(server.get("/v1/load_lora_adapter", {"lora_name": "gone", "lora_path": "gone"})) == "model_sleeping"
            assert code(server.get("/v1/completions", {**ASK, "model": "named"})) == "model_sleeping"
            assert post(server, "/wake_up") == (200, "")
            assert [text(server, name) for name in names] == before
        # One that cannot be read again is said to be the fault; without it the model wakes.
        assert post(server, "/sleep") == (200, "")
        shutil.rmtree(tmp_path / "loaded")
        status, body = post(server, "/wake_up")
        assert status == 503 and code([body]) == "wake_failed" and "`loaded`" in body
        assert sleeping(server)
        assert server.get("/v1/unload_lora_adapter", {"lora_name": "loaded"})[0] == 200
        assert post(server, "/wake_up") == (200, "")
        assert [text(server, name) for name in names[:2]] == before[:2]


def test_an_engine_of_another_process_sleeps(tmp_path):
    address = f"ipc://{tmp_path}/engine"
    engine = subprocess.Popen([BINARY, "engine", "--listen", address], stderr=subprocess.DEVNULL)
    try:
        with Server("--engine", address) as one, Server("--engine", address) as two:
            before = answer(one)["choices"]
            assert post(one, "/sleep?level=2") == (200, "")
            two.await_(lambda: sleeping(two))
            assert code(two.get("/v1/completions", ASK)) == "model_sleeping"
            assert post(two, "/wake_up") == (200, "")
            one.await_(lambda: not sleeping(one))
            assert answer(one)["choices"] == before
            engine.kill()
            one.await_(lambda: one.get("/readyz")[0] == 503)
            status, body = post(one, "/sleep")
            assert status == 503 and code([body]) == "engine_gone"
    finally:
        engine.kill()
        engine.wait()
