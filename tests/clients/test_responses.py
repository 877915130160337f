"""OpenAI's responses, by the official Python client and its own event types."""

import json
import typing

import openai
import pytest
from conftest import PERSON, WEATHER, Server, until_called
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent

SAY = "Tell me a story about a cat."
TOOLS = [{"type": "function", "name": "get_weather", "description": "x", "parameters": WEATHER, "strict": True}]
MUST = {"type": "function", "name": "get_weather"}
EVENTS = {typing.get_args(kind.model_fields["type"].annotation)[0]: kind for kind in typing.get_args(typing.get_args(ResponseStreamEvent)[0])}


@pytest.fixture(scope="module")
def caller(callers):
    return OpenAI(base_url=f"{callers.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def ask(client, model):
    def ask(said=SAY, **options):
        return client.responses.create(**{"model": model, "input": said, "max_output_tokens": 24, "temperature": 0, **options})
    return ask


def strict(value):
    """What the client makes of JSON it does not check; this checks it against its own types."""
    kind = EVENTS[value.type] if hasattr(value, "sequence_number") else Response
    return kind.model_validate(value.model_dump(by_alias=True, warnings=False), strict=False)


def test_a_response(ask, model):
    answer = strict(ask(instructions="Be brief.", metadata={"a": "b"}, user="u"))
    assert answer.object == "response" and answer.model == model and answer.id.startswith("resp_") and answer.metadata == {"a": "b"}
    (item,) = answer.output
    assert item.type == "message" and item.role == "assistant" and item.id.startswith("msg_") and item.content[0].type == "output_text"
    assert answer.output_text == item.content[0].text and answer.instructions == "Be brief." and answer.temperature == 0
    assert answer.status in ("completed", "incomplete") and item.status == answer.status
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    cut = strict(ask(max_output_tokens=3))
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens" and cut.usage.output_tokens == 3
    assert cut.max_output_tokens == 3


def test_input_of_every_shape(ask):
    text = ask(instructions="Be brief.").output_text
    for said in ([{"role": "user", "content": SAY}],
                 [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": SAY}]}]):
        assert ask(said, instructions="Be brief.").output_text == text
    for role in ("system", "developer"):
        assert ask([{"role": role, "content": "Be brief."}, {"role": "user", "content": SAY}]).output_text == text
    tokens = lambda **options: ask(max_output_tokens=1, **options).usage.input_tokens
    assert tokens(instructions="Be brief.") > tokens()


def check_events(events, final):
    """Every event is one of the client's own types, in an order that its items allow."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [strict(event).type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == f"response.{final.status}"
    assert events[0].response.id == final.id and events[0].response.status == "in_progress" and events[0].response.output == []
    added = [e for e in events if e.type == "response.output_item.added"]
    done = [e for e in events if e.type == "response.output_item.done"]
    assert [e.output_index for e in added] == [e.output_index for e in done] == list(range(len(final.output)))
    assert [e.item.id for e in added] == [e.item.id for e in done] == [item.id for item in final.output]
    assert [e.item for e in done] == final.output and all(e.item.status == "in_progress" for e in added)
    for index, item in enumerate(final.output):
        own = [e for e in events if getattr(e, "output_index", None) == index]
        inner = [e.type for e in own[1:-1]]
        assert all(e.item_id == item.id for e in own[1:-1])
        deltas = "".join(e.delta for e in own if e.type.endswith(".delta"))
        if item.type == "function_call":
            assert deltas == item.arguments == own[-2].arguments and set(inner[:-1]) == {"response.function_call_arguments.delta"}
            continue
        name = "output_text" if item.type == "message" else "reasoning_text"
        assert inner[0] == "response.content_part.added" and inner[-2:] == [f"response.{name}.done", "response.content_part.done"]
        assert set(inner[1:-2]) == {f"response.{name}.delta"}
        assert deltas == item.content[0].text == own[-3].text == own[-2].part.text


def test_a_stream(client, ask, model):
    whole = ask()
    events = list(ask(stream=True))
    final = events[-1].response
    check_events(events, final)
    assert final.output_text == whole.output_text and final.status == whole.status and len(events) > 10
    assert final.usage.output_tokens == whole.usage.output_tokens
    # The client's own accumulation knows complete responses only.
    schema = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    ends = {"model": model, "input": SAY, "max_output_tokens": 200, "temperature": 2, "text": schema, "extra_body": {"seed": 1}}
    with client.responses.stream(**ends) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == client.responses.create(**ends).output_text


def test_calls(caller):
    ask = {"model": "caller", "input": SAY, "tools": TOOLS, "tool_choice": MUST, "max_output_tokens": 300, "temperature": 2,
           "reasoning": {"effort": "none"}, "parallel_tool_calls": False}

    def called(seed):
        answer = caller.responses.create(**ask, extra_body={"seed": seed})
        return answer if answer.status == "completed" else None

    seed, answer = until_called(called)
    call = strict(answer).output[-1]
    assert call.type == "function_call" and call.id.startswith("fc_") and call.call_id and call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo")
    events = list(caller.responses.create(**ask, extra_body={"seed": seed}, stream=True))
    check_events(events, events[-1].response)
    assert events[-1].response.output[-1].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more = {**ask, "tool_choice": "none", "max_output_tokens": 4}
    given = caller.responses.create(**{**more, "input": [{"role": "user", "content": SAY}, *answer.output, result]})
    kept = caller.responses.create(**{**more, "input": [result]}, previous_response_id=answer.id)
    bare = caller.responses.create(**more)
    assert kept.usage.input_tokens == given.usage.input_tokens > bare.usage.input_tokens and kept.previous_response_id == answer.id


def test_thoughts(caller):
    ask = {"model": "thinker", "input": SAY, "max_output_tokens": 12, "temperature": 0}
    answer = strict(caller.responses.create(**ask))
    (item,) = answer.output
    assert item.type == "reasoning" and item.id.startswith("rs_") and item.content[0].text and item.status == "incomplete"
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens <= 16
    events = list(caller.responses.create(**ask, stream=True))
    check_events(events, events[-1].response)
    assert events[-1].response.output[0].content == item.content


def test_a_conversation_goes_on(client, ask, model):
    first = ask()
    second = ask("And then?", previous_response_id=first.id)
    turns = [{"role": "user", "content": SAY}, *first.output, {"role": "user", "content": "And then?"}]
    assert second.usage.input_tokens == ask(turns).usage.input_tokens and second.output_text == ask(turns).output_text
    third = ask("And then?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens
    assert client.responses.retrieve(second.id) == second
    streamed = list(ask(stream=True))[-1].response
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
    assert client.responses.delete(second.id) is None
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    assert ask("And then?", previous_response_id=third.id).output_text, "a response has all that went before"
    unkept = ask(store=False)
    for id in (unkept.id, second.id, "resp_none"):
        with pytest.raises(openai.NotFoundError) as error:
            ask("And then?", previous_response_id=id)
        assert error.value.body["param"] == "previous_response_id" and error.value.body["code"] == "response_not_found"


def test_a_key_has_its_own_responses_and_the_oldest_make_room():
    with Server("--api-key", "one", "--api-key", "two", "--max-responses", "3") as server:
        one, two = (OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        model = one.models.list().data[0].id
        made = [one.responses.create(model=model, input=SAY, max_output_tokens=1).id for _ in range(4)]
        other = two.responses.create(model=model, input=SAY, max_output_tokens=1).id

        def known(client, id):
            try:
                return client.responses.retrieve(id).id == id
            except openai.NotFoundError:
                return False

        assert [known(one, id) for id in made] == [False, True, True, True]
        assert known(two, other) and not known(one, other) and not known(two, made[3])
        with pytest.raises(openai.NotFoundError):
            two.responses.delete(made[3])
        with pytest.raises(openai.NotFoundError):
            two.responses.create(model=model, input=SAY, previous_response_id=made[3])
        assert known(one, made[3])
        with pytest.raises(openai.AuthenticationError):
            OpenAI(base_url=f"{server.url}/v1", api_key="three", max_retries=0).responses.retrieve(made[3])


def test_texts_are_held_to_schemas(ask):
    schema = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    answer = strict(ask(text=schema, max_output_tokens=200, temperature=2, extra_body={"seed": 1}))
    assert answer.status == "completed" and set(json.loads(answer.output_text)) == {"name", "age"} and answer.text.format.name == "person"
    whole = ask(text={"format": {"type": "json_object"}}, max_output_tokens=200, extra_body={"seed": 3})
    assert whole.output_text.startswith("{")


def test_errors(ask, client, model):
    for options in ({"background": True}, {"top_logprobs": 2}, {"truncation": "auto"}, {"conversation": "conv_1"}, {"prompt": {"id": "p"}},
                    {"tools": [{"type": "web_search"}]}, {"temperature": 9}, {"text": {"verbosity": "low"}}):
        with pytest.raises(openai.UnprocessableEntityError) as error:
            ask(**options)
        assert set(error.value.body) == {"message", "type", "param", "code"} and next(iter(options)) in error.value.body["param"]
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}
    for item in (image, {"type": "item_reference", "id": "x"}, {"type": "computer_call_output", "call_id": "x", "output": {}}):
        with pytest.raises(openai.UnprocessableEntityError):
            ask([item])
    for item in ({"role": "robot", "content": "x"}, {"role": "user"}, {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}, 3):
        with pytest.raises(openai.BadRequestError) as error:
            ask([item])
        assert error.value.body["param"].startswith("input.0")
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/responses", body={"model": model}, cast_to=object)
    assert "input" in error.value.body["message"]
