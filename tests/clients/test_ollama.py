"""Ollama's official Python client, and its streams as they are on the wire."""

import json

import pytest
from conftest import PERSON, WEATHER
from ollama import Client, ResponseError

ASK = [{"role": "user", "content": "Tell me a story about a cat."}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "x", "parameters": WEATHER}}]
COLD = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def ollama(server):
    return Client(host=server.url, timeout=60)


@pytest.fixture(scope="module")
def caller(callers):
    return Client(host=callers.url, timeout=60)


def test_models(ollama, model, server):
    (listed,) = ollama.list().models
    assert listed.model == model and listed.size > 1000 and listed.modified_at.year > 2020 and listed.details.format == "safetensors"
    shown = ollama.show(model)
    assert "message" in shown.template and shown.capabilities == ["completion"]
    assert shown.modelinfo[f"{shown.details.family}.context_length"] == server.json("/v1/models")["data"][0]["max_model_len"]
    assert server.json("/api/version") == server.json("/version")
    with pytest.raises(ResponseError) as error:
        ollama.show("none")
    assert error.value.status_code == 404 and "none" in error.value.error


def test_what_a_template_can(caller):
    assert caller.show("caller").capabilities == ["completion", "tools", "thinking"]


def test_chat(ollama, model, client):
    answer = ollama.chat(model, ASK, options=COLD)
    assert answer.message.role == "assistant" and answer.done and answer.done_reason in ("stop", "length")
    same = client.chat.completions.create(model=model, messages=ASK, max_tokens=24, temperature=0)
    assert answer.message.content == same.choices[0].message.content
    assert (answer.prompt_eval_count, answer.eval_count) == (same.usage.prompt_tokens, same.usage.completion_tokens)
    assert 0 < answer.prompt_eval_duration <= answer.total_duration and answer.created_at.endswith("Z")
    assert ollama.chat(f"{model}:latest", ASK, options=COLD).message.content == answer.message.content
    assert ollama.chat(model, ASK, options={**COLD, "num_predict": 3}).done_reason == "length"


def test_an_answer_that_was_begun_goes_on(ollama, model):
    text = ollama.chat(model, ASK, options=COLD).message.content
    begun = text[: text.index(" ", 8)]
    rest = ollama.chat(model, [*ASK, {"role": "assistant", "content": begun}], options=COLD).message.content
    assert rest.startswith(text[len(begun):])


def test_chat_streams(ollama, model):
    whole = ollama.chat(model, ASK, options=COLD)
    *parts, last = ollama.chat(model, ASK, options=COLD, stream=True)
    assert len(parts) > 3 and all(not part.done and part.message.content for part in parts)
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert last.done and last.done_reason == whole.done_reason and last.eval_count == whole.eval_count and last.message.content == ""


def test_lines_are_the_default(server, model):
    status, headers, text = server.get("/api/chat", {"model": model, "messages": ASK, "options": COLD})
    assert status == 200 and headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in text.splitlines()]
    assert text.endswith("\n") and [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_generate(ollama, model, client):
    answer = ollama.generate(model, ASK[0]["content"], options=COLD)
    assert answer.response == ollama.chat(model, ASK, options=COLD).message.content and answer.done
    parts = list(ollama.generate(model, ASK[0]["content"], options=COLD, stream=True))
    assert "".join(part.response for part in parts) == answer.response and parts[-1].done_reason == answer.done_reason
    system = ollama.generate(model, ASK[0]["content"], system="Be brief.", options=COLD)
    assert system.prompt_eval_count > answer.prompt_eval_count
    raw = ollama.generate(model, "Once upon a time", raw=True, options=COLD)
    plain = client.completions.create(model=model, prompt="Once upon a time", max_tokens=24, temperature=0)
    assert raw.response == plain.choices[0].text and raw.prompt_eval_count == plain.usage.prompt_tokens


def test_without_words_a_model_is_loaded(ollama, model):
    assert ollama.generate(model).done_reason == "load" and ollama.chat(model).done_reason == "load"
    with pytest.raises(ResponseError):
        ollama.generate("none")


def test_options(ollama, model):
    said = lambda **options: ollama.chat(model, ASK, options={**COLD, **options}).message.content
    text = said()
    assert said(temperature=1, top_k=1) == said(temperature=1, top_p=1e-6) == said(temperature=1, min_p=1.0) == text
    assert said(stop=[text[6:11]]) == text[: text.find(text[6:11])]
    assert said(temperature=1, seed=5) == said(temperature=1, seed=5) != said(temperature=1, seed=6)
    assert said(repeat_penalty=1.5, frequency_penalty=2.0, presence_penalty=2.0) != text
    assert said(num_ctx=4096, num_gpu=1, typical_p=1.0) == text
    everything = ollama.chat(model, ASK, options={"temperature": 0, "num_predict": -1, "stop": text[6:11]})
    assert everything.message.content == text[: text.find(text[6:11])]


def test_formats(ollama, model):
    options = {"temperature": 2, "num_predict": 200, "seed": 1}
    answer = ollama.chat(model, ASK, format=PERSON, options=options)
    assert answer.done_reason == "stop" and set(json.loads(answer.message.content)) == {"name", "age"}
    assert ollama.generate(model, "x", format="json", options=options).response.startswith("{")


def test_calls(caller):
    # Nothing makes it call; a choice of words does.
    assert caller.chat("caller", ASK, tools=TOOLS, options=COLD, think=False).message.tool_calls is None
    count = lambda messages, **more: caller.chat("caller", messages, options={**COLD, "num_predict": 1}, think=False, **more).prompt_eval_count
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    turn = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_name": "get_weather", "content": "rain"}]
    assert count(turn, tools=TOOLS) > count(ASK, tools=TOOLS) > count(ASK)


def test_thoughts(caller):
    answer = caller.chat("thinker", ASK, options=COLD)
    assert answer.message.thinking and answer.message.content == ""
    parts = list(caller.chat("thinker", ASK, options=COLD, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == answer.message.thinking
    assert caller.generate("thinker", "x", options=COLD).thinking
    count = lambda think: caller.chat("caller", ASK, options={**COLD, "num_predict": 1}, think=think).prompt_eval_count
    assert count(False) > count(True)


def test_errors(ollama, server, model):
    refused = [({"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, 422), ({"messages": [{"content": "x"}]}, 400), ({"messages": 3}, 400),
               ({"messages": ASK, "options": {"temperature": 9}}, 422), ({"messages": ASK, "options": {"mirostat": 2}}, 422),
               ({"messages": ASK, "options": {"temperature": "hot"}}, 400), ({"messages": ASK, "format": "xml"}, 400), ({"messages": ASK, "tools": TOOLS}, 422),
               ({"messages": ASK, "logprobs": True}, 422), ({"messages": ASK, "think": 3}, 400), ({"model": "none", "messages": ASK}, 404)]
    for body, expected in refused:
        status, _, text = server.get("/api/chat", {"model": model, **body})
        assert status == expected and set(json.loads(text)) == {"error"} and json.loads(text)["error"], (body, status, text)
    for body in ({"suffix": "x"}, {"template": "x"}, {"context": [1]}, {"images": ["AA=="]}):
        assert server.get("/api/generate", {"model": model, "prompt": "x", **body})[0] == 422, body
    with pytest.raises(ResponseError) as error:
        ollama.chat("none", ASK)
    assert error.value.status_code == 404 and "none" in error.value.error
    assert json.loads(server.get("/api/nowhere")[2])["error"] == "there is nothing at /api/nowhere"
    warning = server.get("/api/chat", {"model": model, "messages": ASK, "keep_alive": "5m", "options": {"num_ctx": 1, "nonsense": 2, "num_predict": 1}})[1]["x-infernum-warning"]
    assert all(name in warning for name in ("keep_alive", "num_ctx", "nonsense"))


def test_keys(keyed):
    assert keyed.get("/api/tags")[0] == 401
    client = Client(host=keyed.url, headers={"authorization": "Bearer secret-1"})
    assert client.list().models and client.chat(client.list().models[0].model, ASK, options=COLD).done
