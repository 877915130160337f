"""The official Python client, sync and async."""

import asyncio
import json
import math
import re

import openai
import pytest
from conftest import ENDLESS, PERSON, WEATHER
from openai import AsyncOpenAI, OpenAI

PROMPT = "Once upon a time"
ASK = [{"role": "user", "content": "Tell me a story about a cat."}]


@pytest.fixture
def chat(client, model):
    def chat(messages=ASK, **options):
        return client.chat.completions.create(**{"model": model, "messages": messages, "max_tokens": 24, "temperature": 0, **options})
    return chat


@pytest.fixture
def complete(client, model):
    def complete(prompt=PROMPT, **options):
        return client.completions.create(**{"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, **options})
    return complete


def check_usage(usage, exact=None):
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens > 0 and usage.completion_tokens > 0
    assert exact is None or usage.completion_tokens == exact
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_models(client, model):
    models = client.models.list().data
    assert [m.id for m in models] == [model] and models[0].object == "model"
    assert models[0].max_model_len >= 128
    assert client.models.retrieve(model).id == model


def test_chat(chat, model):
    answer = chat()
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == model and len(answer.choices) == 1
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length") and choice.index == 0 and choice.logprobs is None
    check_usage(answer.usage)


def test_completion(complete, model):
    answer = complete()
    choice = answer.choices[0]
    assert answer.object == "text_completion" and answer.model == model and choice.text
    assert choice.finish_reason in ("stop", "length") and choice.logprobs is None
    check_usage(answer.usage)


def test_length_ends_it(chat, complete):
    assert (answer := chat(max_tokens=5, extra_body=ENDLESS)).choices[0].finish_reason == "length"
    check_usage(answer.usage, 5)
    assert (answer := complete(max_tokens=5, extra_body=ENDLESS)).choices[0].finish_reason == "length"
    check_usage(answer.usage, 5)
    new = chat(max_tokens=openai.NOT_GIVEN, max_completion_tokens=3, extra_body=ENDLESS)
    check_usage(new.usage, 3)


def test_content_in_parts(chat):
    parts = [{"type": "text", "text": "Tell me a story "}, {"type": "text", "text": "about a cat."}]
    whole = chat([{"role": "user", "content": parts}]).choices[0].message.content
    assert whole


def test_chat_streams(chat):
    chunks = list(chat(stream=True))
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    first, *middle, last = [c.choices[0] for c in chunks]
    assert first.delta.role == "assistant" and first.delta.content == "" and first.finish_reason is None
    assert all(c.delta.content and c.delta.role is None and c.finish_reason is None for c in middle)
    assert last.delta.content is None and last.finish_reason in ("stop", "length")
    assert len(middle) > 1, "it comes in pieces"
    whole = chat().choices[0]
    assert "".join(c.delta.content for c in middle) == whole.message.content
    assert last.finish_reason == whole.finish_reason
    assert all(c.usage is None for c in chunks)


def test_completion_streams(complete):
    chunks = list(complete(stream=True))
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    whole = complete().choices[0]
    assert "".join(c.choices[0].text for c in chunks) == whole.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [whole.finish_reason]


def test_usage_in_a_stream(chat, complete):
    for ask in (chat, complete):
        *chunks, last = list(ask(stream=True, stream_options={"include_usage": True}))
        assert last.choices == [] and all(c.usage is None and c.choices for c in chunks)
        assert last.usage.total_tokens == ask().usage.total_tokens
        check_usage(last.usage)
        assert all(c.choices for c in ask(stream=True, stream_options={"include_usage": False}))


def test_n(chat, complete):
    answer = chat(n=3, temperature=1, seed=5)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    texts = [c.message.content for c in answer.choices]
    assert len(set(texts)) > 1, "each has its own randomness"
    streamed = ["", "", ""]
    ends = {}
    for chunk in chat(n=3, temperature=1, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert streamed == texts and sorted(ends) == [0, 1, 2]
    assert [c.index for c in complete([PROMPT, "The cat"], n=2).choices] == [0, 1, 2, 3]


def test_best_of(complete):
    answer = complete(best_of=4, n=1, temperature=1, seed=1, max_tokens=6)
    assert len(answer.choices) == 1 and answer.usage.completion_tokens >= answer.usage.completion_tokens
    with pytest.raises((openai.UnprocessableEntityError, openai.BadRequestError)):
        complete(best_of=1, n=2)


def test_prompts_of_every_shape(complete, server, model):
    tokens = server.json("/tokenize", {"model": model, "prompt": PROMPT})["tokens"]
    text = complete().choices[0].text
    assert complete(tokens).choices[0].text == text
    assert complete([PROMPT]).choices[0].text == text
    assert [c.text for c in complete([tokens, tokens]).choices] == [text, text]
    other = complete("The dog").choices[0].text
    assert [c.text for c in complete([PROMPT, "The dog"]).choices] == [text, other]


def test_stop(chat, complete):
    text = chat().choices[0].message.content
    for stop in (text[9:14], [text[12:16], "never this"], text[3:4]):
        stops = [stop] if isinstance(stop, str) else stop
        expected = text[: min(text.find(s) for s in stops if s in text)]
        answer = chat(stop=stop).choices[0]
        assert answer.message.content == expected and answer.finish_reason == "stop"
        streamed = "".join(c.choices[0].delta.content or "" for c in chat(stop=stop, stream=True))
        assert streamed == expected, "no part of it leaks into the stream"
    text = complete().choices[0].text
    answer = complete(stop=[text[8:11]]).choices[0]
    assert answer.text == text[: text.find(text[8:11])] and answer.finish_reason == "stop"


def test_seed(chat, complete):
    for ask, text in ((chat, lambda c: c.message.content), (complete, lambda c: c.text)):
        hot = {"temperature": 1.0, "top_p": 0.95}
        one, again, other = [text(ask(seed=s, **hot).choices[0]) for s in (11, 11, 12)]
        assert one == again and one != other
    assert len({chat(temperature=1).choices[0].message.content for _ in range(4)}) > 1


def test_a_cached_prefix_changes_no_text(complete):
    shared = [300 + i * 7919 % 1200 for i in range(400)]
    complete(shared, max_tokens=1)
    for i in range(8):
        prompt = [*shared, *range(300 + i, 320 + 2 * i)]
        options = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
        found = complete(prompt, **options)
        # Another salt shares nothing.
        anew = complete(prompt, **{**options, "extra_body": {"ignore_eos": True, "cache_salt": f"salt {i}"}})
        assert found.usage.prompt_tokens_details.cached_tokens >= 384
        assert anew.usage.prompt_tokens_details.cached_tokens == 0
        assert found.choices[0].text == anew.choices[0].text


def test_sampling_fields(chat):
    greedy = chat().choices[0].message.content
    assert chat(temperature=1, extra_body={"top_k": 1}).choices[0].message.content == greedy
    assert chat(temperature=1, top_p=1e-6).choices[0].message.content == greedy
    assert chat(temperature=1, extra_body={"min_p": 1.0}).choices[0].message.content == greedy
    # Nothing is said twice where repeating costs much.
    options = {"frequency_penalty": 2, "presence_penalty": 2, "extra_body": {"repetition_penalty": 1.5}}
    assert chat(**options).choices[0].message.content != greedy


def test_chat_logprobs(chat):
    answer = chat(logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    ended = answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens - len(content) in ((0, 1) if ended else (0,))
    for item in content:
        assert item.logprob <= 0 and len(item.top_logprobs) == 3
        assert item.token == item.top_logprobs[0].token, "greedy takes the likeliest"
        assert item.logprob == pytest.approx(item.top_logprobs[0].logprob)
        assert sum(math.exp(t.logprob) for t in item.top_logprobs) <= 1 + 1e-4
        assert sorted((t.logprob for t in item.top_logprobs), reverse=True) == [t.logprob for t in item.top_logprobs]
    said = bytes(b for item in content for b in item.bytes).decode()
    assert answer.choices[0].message.content in said
    none = chat(logprobs=True).choices[0].logprobs.content
    assert [t.token for t in none] == [t.token for t in content] and all(t.top_logprobs == [] for t in none)
    streamed = [t for c in chat(logprobs=True, top_logprobs=3, stream=True) if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in content]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in content], abs=1e-3)


def test_completion_logprobs_and_echo(complete):
    plain = complete(logprobs=2, max_tokens=6).choices[0]
    got = plain.logprobs
    assert len(got.tokens) == len(got.token_logprobs) == len(got.top_logprobs) == len(got.text_offset)
    assert got.text_offset[0] == 0 and all(len(top) >= 2 for top in got.top_logprobs)
    assert complete(echo=True).choices[0].text == PROMPT + complete().choices[0].text
    echo = complete(echo=True, logprobs=2, max_tokens=6).choices[0]
    assert echo.text == PROMPT + plain.text
    prompt = len(echo.logprobs.tokens) - len(got.tokens)
    assert prompt > 0 and echo.logprobs.token_logprobs[0] is None and all(p <= 0 for p in echo.logprobs.token_logprobs[1:])
    assert echo.logprobs.tokens[prompt:] == got.tokens
    assert echo.logprobs.token_logprobs[prompt:] == pytest.approx(got.token_logprobs, abs=1e-3)
    scored = complete(echo=True, logprobs=1, max_tokens=0).choices[0]
    assert scored.text == PROMPT and len(scored.logprobs.tokens) == prompt
    streamed = "".join(c.choices[0].text for c in complete(echo=True, stream=True))
    assert streamed == complete(echo=True).choices[0].text


def test_logit_bias(complete, server, model):
    token = server.json("/tokenize", {"model": model, "prompt": " cat", "add_special_tokens": False})["tokens"][-1]
    forced = complete(logit_bias={str(token): 100}, max_tokens=4)
    word = server.json("/detokenize", {"model": model, "tokens": [token] * 4})["prompt"]
    assert forced.choices[0].text.strip() == word.strip()
    first = complete(logprobs=1, max_tokens=1).choices[0].logprobs.tokens[0]
    id = server.json("/tokenize", {"model": model, "prompt": first, "add_special_tokens": False})["tokens"]
    if len(id) == 1:
        assert complete(logit_bias={str(id[0]): -100}, logprobs=1, max_tokens=1).choices[0].logprobs.tokens[0] != first


def shape(error):
    """The four keys of every error."""
    body = error.value.body
    assert set(body) == {"message", "type", "param", "code"} and body["message"] and body["type"]
    return body


def test_errors_have_their_class(chat, complete, client, model):
    with pytest.raises(openai.NotFoundError) as error:
        chat(model="no-such-model")
    assert shape(error)["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")
    with pytest.raises(openai.BadRequestError) as error:
        complete("word " * 20000)
    assert shape(error)["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/chat/completions", body={"model": model}, cast_to=object)
    assert "messages" in shape(error)["message"]
    out_of_range = [{"temperature": 9}, {"top_p": 2}, {"n": 0}, {"max_tokens": -1}, {"frequency_penalty": 5},
                    {"logprobs": True, "top_logprobs": 21}, {"stop": ["a"] * 65}, {"logit_bias": {"1": 500}}]
    for options in out_of_range:
        with pytest.raises(openai.UnprocessableEntityError) as error:
            chat(**options)
        assert (shape(error)["param"] or "").split(".")[0].split("[")[0] in options, options


def test_what_is_not_built_yet_is_refused(chat):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    # The demo's template knows no calls.
    with pytest.raises(openai.UnprocessableEntityError) as error:
        chat(tools=[tool])
    assert shape(error)["param"] == "tools"
    assert chat(response_format={"type": "text"}, user="u").choices[0].message.content


def test_unknown_fields_are_named(client, model):
    raw = client.chat.completions.with_raw_response.create(model=model, messages=ASK, max_tokens=1, extra_body={"nonsense_field": 1})
    assert any("nonsense_field" in value for value in raw.headers.values()), dict(raw.headers)


def test_keys(keyed):
    url = f"{keyed.url}/v1"
    for key in ("secret-1", "secret-2"):
        good = OpenAI(base_url=url, api_key=key, max_retries=0)
        assert good.completions.create(model=good.models.list().data[0].id, prompt="a", max_tokens=1).choices
    for key in ("wrong", "secret-", "secret-12"):
        with pytest.raises(openai.AuthenticationError) as error:
            OpenAI(base_url=url, api_key=key, max_retries=0).models.list()
        shape(error)


def test_async(server, model):
    async def one(client, seed):
        text = ""
        stream = await client.chat.completions.create(model=model, messages=ASK, max_tokens=16, temperature=1, seed=seed, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        whole = await client.chat.completions.create(model=model, messages=ASK, max_tokens=16, temperature=1, seed=seed)
        return text, whole.choices[0].message.content

    async def many():
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            pairs = await asyncio.gather(*(one(client, seed) for seed in range(16)))
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="no", prompt="x")
            return pairs

    pairs = asyncio.run(many())
    assert all(streamed == whole for streamed, whole in pairs), "the others in a batch change nothing"
    assert len({text for text, _ in pairs}) > 1


def test_a_stream_can_be_left(server, client, model):
    stream = client.chat.completions.create(model=model, messages=ASK, max_tokens=1500, extra_body=ENDLESS, stream=True)
    for at, _ in enumerate(stream):
        if at == 3:
            break
    stream.close()
    server.until_idle(5)


def test_texts_are_held_to_gbnf(complete):
    grammar = 'root ::= "<" pair ("," pair){0,3} ">"\npair ::= [a-z]{1,3} "=" ("yes" | "no")'
    for field in ({"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}):
        text = complete(max_tokens=100, temperature=1.5, seed=4, extra_body=field).choices[0].text
        assert re.fullmatch(r"<[a-z]{1,3}=(yes|no)(,[a-z]{1,3}=(yes|no)){0,3}>", text)


def test_texts_are_held_to_schemas(chat, complete):
    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    answer = chat(response_format=schema, max_tokens=200, temperature=2, seed=1)
    assert answer.choices[0].finish_reason == "stop"
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120
    chunks = list(chat(response_format=schema, max_tokens=200, temperature=2, seed=1, stream=True))
    assert json.loads("".join(c.choices[0].delta.content or "" for c in chunks)) == person
    for extra in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}):
        assert complete(temperature=2, extra_body=extra).choices[0].text in ("yes", "no")
    with pytest.raises(openai.BadRequestError) as error:
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}})
    assert shape(error)["param"] == "response_format" and shape(error)["code"] == "invalid_grammar"


@pytest.fixture(scope="module")
def caller(callers):
    return OpenAI(base_url=f"{callers.url}/v1", api_key="none")


def test_tools_are_called(caller):
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "x", "parameters": WEATHER}}]
    ask = {"model": "caller", "messages": ASK, "tools": tools, "max_tokens": 300, "temperature": 2, "seed": 2,
           "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "parallel_tool_calls": False,
           "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    answers = [caller.chat.completions.create(**{**ask, "seed": seed}).choices[0] for seed in range(6)]
    called = [a for a in answers if a.finish_reason == "tool_calls"]
    assert called
    for answer in called:
        (call,) = answer.message.tool_calls
        assert call.type == "function" and call.id and call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
        assert answer.message.content is None
    seed = next(seed for seed, a in enumerate(answers) if a.finish_reason == "tool_calls")
    with caller.chat.completions.stream(**{**ask, "seed": seed}) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert any(e.type == "tool_calls.function.arguments.delta" for e in events)
    assert final.message.tool_calls[0].function.arguments == answers[seed].message.tool_calls[0].function.arguments
    turn = [*ASK, answers[seed].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": answers[seed].message.tool_calls[0].id, "content": "rain"}]
    again = caller.chat.completions.create(**{**ask, "messages": turn, "tool_choice": "none", "max_tokens": 8})
    assert again.choices[0].message.tool_calls is None and again.usage.completion_tokens > 0
