"""Anthropic's official Python client."""

import json

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from conftest import PERSON, WEATHER, until_called

ASK = [{"role": "user", "content": "Tell me a story about a cat."}]
TOOLS = [{"name": "get_weather", "description": "x", "input_schema": WEATHER}]
MUST = {"type": "tool", "name": "get_weather"}


@pytest.fixture(scope="module")
def claude(server):
    return Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def caller(callers):
    return Anthropic(base_url=callers.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def ask(claude, model):
    def ask(messages=ASK, **options):
        return claude.messages.create(**{"model": model, "messages": messages, "max_tokens": 24, "extra_body": {"temperature": 0}, **options})
    return ask


def test_a_message(ask, model):
    answer = ask(system="Be brief.", metadata={"user_id": "u"})
    assert answer.type == "message" and answer.role == "assistant" and answer.model == model and answer.id.startswith("msg_")
    (block,) = answer.content
    assert block.type == "text" and block.text
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.stop_sequence is None
    assert answer.usage.output_tokens > 0 and answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 0
    assert answer._request_id.startswith("req-") and ask(max_tokens=3).stop_reason == "max_tokens"


def test_texts_in_blocks_are_the_same_texts(ask, claude, model):
    text = ask(system="Be brief.").content[0].text
    parts = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"], "cache_control": {"type": "ephemeral"}}]}]
    assert ask(parts, system=[{"type": "text", "text": "Be brief."}]).content[0].text == text
    counted = claude.messages.count_tokens(model=model, messages=ASK, system="Be brief.").input_tokens
    used = ask(system="Be brief.").usage
    assert counted == used.input_tokens + used.cache_read_input_tokens
    longer = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "There was a cat."}]}, {"role": "user", "content": "And then?"}]
    assert claude.messages.count_tokens(model=model, messages=longer, system="Be brief.").input_tokens > counted


def test_an_answer_that_was_begun_goes_on(ask):
    text = ask().content[0].text
    begun = text[: text.index(" ", 8)]
    rest = ask([*ASK, {"role": "assistant", "content": begun}]).content[0].text
    assert rest.startswith(text[len(begun):]) and rest[0] == " "
    parts = [{"type": "text", "text": begun}]
    assert ask([*ASK, {"role": "assistant", "content": parts}]).content[0].text == rest


def test_a_stop_sequence_is_named(ask):
    text = ask().content[0].text
    answer = ask(stop_sequences=["never this", text[6:11]])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == text[6:11]
    assert answer.content[0].text == text[: text.find(text[6:11])]


def test_a_stream(claude, ask, model):
    whole = ask()
    raw = list(ask(stream=True))
    kinds = [event.type for event in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"} and len(kinds) > 8, "it comes in pieces"
    assert raw[0].message.stop_reason is None and raw[0].message.content == []
    assert raw[-2].usage.output_tokens == whole.usage.output_tokens
    with claude.messages.stream(model=model, messages=ASK, max_tokens=24, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens


def test_calls(caller):
    ask = {"model": "caller", "messages": ASK, "tools": TOOLS, "tool_choice": MUST, "max_tokens": 300, "thinking": {"type": "disabled"}}

    def called(seed):
        answer = caller.messages.create(**ask, extra_body={"temperature": 2, "seed": seed})
        return answer if answer.stop_reason == "tool_use" else None

    seed, answer = until_called(called)
    call = answer.content[-1]
    assert call.type == "tool_use" and call.id and call.name == "get_weather" and call.input["city"] in ("Paris", "Oslo")
    with caller.messages.stream(**ask, extra_body={"temperature": 2, "seed": seed}) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert final.content[-1].input == call.input and final.stop_reason == "tool_use"
    partial = [e.partial_json for e in events if e.type == "input_json"]
    assert json.loads("".join(partial)) == call.input
    turn = [*ASK, {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]},
                                         {"type": "text", "text": "And tomorrow?"}]}]
    again = caller.messages.create(**{**ask, "messages": turn, "tool_choice": {"type": "none"}, "max_tokens": 8})
    assert all(block.type == "text" for block in again.content) and again.usage.output_tokens > 0
    # The call and its result are in the prompt.
    count = lambda messages: caller.messages.count_tokens(model="caller", messages=messages, tools=TOOLS).input_tokens
    assert count(turn) > count(ASK) + 10
    assert count(ASK) > caller.messages.count_tokens(model="caller", messages=ASK).input_tokens
    anyone = caller.messages.create(**{**ask, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, extra_body={"temperature": 2, "seed": seed})
    assert sum(block.type == "tool_use" for block in anyone.content) <= 1


def test_thoughts(caller):
    ask = {"model": "thinker", "messages": ASK, "max_tokens": 12, "extra_body": {"temperature": 0}}
    answer = caller.messages.create(**ask)
    (block,) = answer.content
    assert block.type == "thinking" and block.thinking and block.signature
    assert 0 < answer.usage.output_tokens_details.thinking_tokens <= 16
    with caller.messages.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert final.content == answer.content
    assert "".join(e.thinking for e in events if e.type == "thinking") == block.thinking
    assert [e.type for e in events].count("signature") == 1
    # They can be sent back.
    turn = [*ASK, {"role": "assistant", "content": [*answer.content, {"type": "text", "text": "Yes."}]}, {"role": "user", "content": "Go on."}]
    assert caller.messages.create(**{**ask, "messages": turn}).content


def test_thinking_is_a_variable_of_the_template(caller):
    count = lambda **more: caller.messages.count_tokens(model="caller", messages=ASK, **more).input_tokens
    assert count(thinking={"type": "disabled"}) > count(thinking={"type": "enabled", "budget_tokens": 2000}) == count()


def test_texts_are_held_to_schemas(ask):
    config = {"format": {"type": "json_schema", "schema": PERSON}}
    answer = ask(output_config=config, max_tokens=200, extra_body={"temperature": 2, "seed": 1})
    assert answer.stop_reason == "end_turn" and set(json.loads(answer.content[0].text)) == {"name", "age"}


def test_errors_have_their_class_and_shape(claude, ask, model):
    def shape(error, kind):
        assert set(error.value.body) == {"type", "error"} and error.value.body["type"] == "error"
        assert error.value.body["error"]["type"] == kind and error.value.body["error"]["message"]
        return error.value.body["error"]["message"]

    with pytest.raises(anthropic.NotFoundError) as error:
        ask(model="claude-none")
    assert "claude-none" in shape(error, "not_found_error")
    with pytest.raises(anthropic.BadRequestError) as error:
        claude.post("/v1/messages", body={"model": model, "messages": ASK}, cast_to=object)
    assert "max_tokens" in shape(error, "invalid_request_error")
    with pytest.raises(anthropic.BadRequestError) as error:
        ask([{"role": "user", "content": "word " * 20000}])
    assert "context length" in shape(error, "invalid_request_error")
    with pytest.raises(anthropic.NotFoundError) as error:
        claude.post("/v1/messages/nowhere", body={}, cast_to=object)
    shape(error, "not_found_error")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    refused = [{"messages": [{"role": "user", "content": [image]}]}, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
               {"tools": TOOLS}, {"container": "c"}]
    for options in refused:
        with pytest.raises(anthropic.UnprocessableEntityError) as error:
            ask(**options)
        shape(error, "invalid_request_error")
    malformed = [{"messages": [{"role": "robot", "content": "x"}]}, {"messages": [{"role": "user", "content": 3}]}, {"tool_choice": {"type": "tool"}},
                 {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {"thinking": {"type": "perhaps"}},
                 {"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]}]
    for options in malformed:
        with pytest.raises(anthropic.BadRequestError) as error:
            ask(**options)
        shape(error, "invalid_request_error")


def test_what_has_no_effect_is_named(claude, model):
    raw = claude.messages.with_raw_response.create(model=model, messages=ASK, max_tokens=1, service_tier="auto", extra_body={"nonsense_field": 1})
    warning = raw.headers["x-infernum-warning"]
    assert "nonsense_field" in warning and "service_tier" in warning


def test_keys(keyed):
    ask = {"messages": ASK, "max_tokens": 1}
    model = keyed.json("/v1/models", authorization="Bearer secret-1")["data"][0]["id"]
    for key in ("secret-1", "secret-2"):
        assert Anthropic(base_url=keyed.url, api_key=key, max_retries=0).messages.create(model=model, **ask).content is not None
        assert keyed.json("/v1/messages", {"model": model, **ask}, x_api_key=key, anthropic_version="2023-06-01")["type"] == "message"
    for headers in ({"x_api_key": "secret-3"}, {}):
        status, _, text = keyed.get("/v1/messages", ask, **headers)
        assert status == 401 and json.loads(text)["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.AuthenticationError):
        Anthropic(base_url=keyed.url, api_key="wrong", max_retries=0).messages.create(model=model, **ask)


def test_async(server, model):
    import asyncio

    async def one(client, seed):
        ask = {"model": model, "messages": ASK, "max_tokens": 16, "extra_body": {"temperature": 1, "seed": seed}}
        async with client.messages.stream(**ask) as stream:
            text = "".join([text async for text in stream.text_stream])
        return text, (await client.messages.create(**ask)).content[0].text

    async def many():
        async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(8)))

    pairs = asyncio.run(many())
    assert all(streamed == whole for streamed, whole in pairs) and len({text for text, _ in pairs}) > 1


def test_a_stream_can_be_left(server, claude, model):
    with claude.messages.stream(model=model, messages=ASK, max_tokens=1500) as stream:
        for at, _ in enumerate(stream):
            if at == 4:
                break
    server.until_idle(5)
