"""Low-rank adapters: served as models, loaded and unloaded while requests run."""

import json
import random
import struct
import threading
import urllib.request
from pathlib import Path

import pytest
from conftest import ENDLESS, Server

DEMO = Path(__file__).parents[2] / "models/demo"
CONFIG = json.loads((DEMO / "config.json").read_text())
PROMPT = "Once upon a time there was a"


def write_adapter(folder, seed, rank=4, alpha=8, **config):
    """An adapter of the demo model as PEFT saves it: random matrices for two products of each layer."""
    rng = random.Random(seed)
    hidden, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    head = CONFIG.get("head_dim") or hidden // heads
    shapes = {"self_attn.q_proj": (heads * head, hidden), "mlp.down_proj": (hidden, CONFIG["intermediate_size"])}
    tensors, data = {}, b""
    for layer in range(CONFIG["num_hidden_layers"]):
        for module, (rows, columns) in shapes.items():
            for half, shape in [("A", (rank, columns)), ("B", (rows, rank))]:
                values = [rng.gauss(0, 1) / shape[1] ** 0.5 for _ in range(shape[0] * shape[1])]
                part = struct.pack(f"<{len(values)}f", *values)
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"
                tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
                data += part
    header = json.dumps(tensors).encode()
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    write_adapter(root / "one", 1)
    write_adapter(root / "two", 2, rank=8)
    write_adapter(root / "dora", 3, use_dora=True)
    write_adapter(root / "high", 4, rank=9)
    outside = write_adapter(tmp_path_factory.mktemp("outside") / "secret", 5)
    (root / "link").symlink_to(outside)
    flags = ["--lora", f"one={root / 'one'}", "--lora-root", str(root), "--max-loras", "2", "--max-lora-rank", "8"]
    with Server(*flags) as server:
        server.base, server.outside = server.model, outside
        yield server


def text(server, model, **more):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}
    return server.json("/v1/completions", body)["choices"][0]["text"]


def load(server, name, path):
    return server.get("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


def unload(server, name):
    return server.get("/v1/unload_lora_adapter", {"lora_name": name})


def names(server):
    return {model["id"]: model.get("parent") for model in server.json("/v1/models")["data"]}


def test_an_adapter_is_a_model_in_every_api(adapted):
    assert names(adapted) == {adapted.base: None, "one": adapted.base}
    assert adapted.json("/v1/models/one")["parent"] == adapted.base
    own, base = text(adapted, "one"), text(adapted, adapted.base)
    assert own != base and text(adapted, "one") == own, "and again, after a prefix from the cache"
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    answers = [adapted.json("/v1/chat/completions", {"model": m, **chat}) for m in ["one", adapted.base]]
    assert answers[0]["model"] == "one" and answers[0]["choices"] != answers[1]["choices"]
    assert adapted.json("/v1/messages", {"model": "one", **chat})["model"] == "one"
    ollama = {"stream": False, "messages": chat["messages"], "options": {"num_predict": 4}}
    assert adapted.json("/api/chat", {"model": "one", **ollama})["model"] == "one"
    assert adapted.json("/v1/responses", {"model": "one", "input": PROMPT, "max_output_tokens": 4})["model"] == "one"


def test_adapters_are_loaded_and_unloaded(adapted):
    assert adapted.get("/v1/completions", {"model": "two", "prompt": PROMPT})[0] == 404
    assert load(adapted, "two", "two")[0] == 200
    alone = {model: text(adapted, model) for model in [adapted.base, "one", "two"]}
    assert len(set(alone.values())) == 3
    # Beside one another, in steps of all three.
    found = {}
    asked = [threading.Thread(target=lambda m=m: found.update({m: text(adapted, m)})) for m in alone]
    [thread.start() for thread in asked]
    [thread.join() for thread in asked]
    assert found == alone
    status, _, told = load(adapted, "three", "one")
    assert status == 400 and "--max-loras" in told, "both slots are taken"
    assert unload(adapted, "two")[0] == 200 and unload(adapted, "two")[0] == 404
    assert "two" not in names(adapted) and adapted.get("/v1/completions", {"model": "two", "prompt": PROMPT})[0] == 404
    assert load(adapted, "two", "one")[0] == 200
    assert text(adapted, "two") == alone["one"], "the files say what it is, not the name"
    assert unload(adapted, "two")[0] == 200


def test_what_runs_ends_before_its_slot_is_given_on(adapted):
    assert load(adapted, "two", "two")[0] == 200
    # Its first token is there, so it runs; how fast the rest comes does not matter.
    body = {"model": "two", "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True, **ENDLESS}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(adapted.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as stream:
        first = stream.readline()
        assert unload(adapted, "two")[0] == 200
        events = [line.removeprefix(b"data: ") for line in [first, *stream] if line.startswith(b"data: {")]
    answer = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert len(answer) > 200
    adapted.await_(lambda: load(adapted, "two", "two")[0] == 200)
    assert text(adapted, "two", max_tokens=200, **ENDLESS) == answer
    assert unload(adapted, "two")[0] == 200


@pytest.mark.parametrize("name,path,word", [
    ("x", "dora", "use_dora"),
    ("x", "high", "--max-lora-rank"),
    ("x", "nowhere", "--lora-root"),
    ("x", "../", "--lora-root"),
    ("x", "link", "--lora-root"),
    ("x", "/etc", "--lora-root"),
    ("x", ".", "adapter_config.json"),
    ("one", "one", "taken"),
    ("", "one", "lora_name"),
])
def test_what_cannot_be_loaded_is_refused_with_its_reason(adapted, name, path, word):
    status, _, told = load(adapted, name, path)
    assert status == 422 and word in told, told
    assert names(adapted) == {adapted.base: None, "one": adapted.base}


def test_clients_load_nothing_unless_they_may(server):
    for answer in [load(server, "x", "/"), unload(server, "x")]:
        assert answer[0] == 403 and "--lora-root" in answer[2]


def test_keys_are_asked_for(tmp_path):
    write_adapter(tmp_path / "one", 1)
    with Server("--lora-root", str(tmp_path), "--api-key", "secret") as server:
        body = {"lora_name": "one", "lora_path": "one"}
        assert server.get("/v1/load_lora_adapter", body)[0] == 401
        assert server.get("/v1/load_lora_adapter", body, authorization="Bearer secret")[0] == 200
