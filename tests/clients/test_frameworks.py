"""LangChain and LiteLLM, each once by each API that it speaks. Their packages have an environment of their own: they pin
other versions of the official clients (`run.sh`)."""

import litellm
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

SAY = "Tell me a story about a cat."
ASK = [{"role": "user", "content": SAY}]


@pytest.fixture(scope="module")
def said(server):
    """What the model says to it."""
    answer = server.json("/v1/chat/completions", {"model": server.model, "messages": ASK, "max_tokens": 12, "temperature": 0})
    return answer["choices"][0]["message"]["content"]


def chats(server):
    """A chat of LangChain for each API."""
    cold = {"model": server.model, "temperature": 0}
    return {
        "chat": ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", max_tokens=12, **cold),
        "responses": ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", max_tokens=12, use_responses_api=True, **cold),
        "messages": ChatAnthropic(base_url=server.url, api_key="none", max_tokens=12, **cold),
        "ollama": ChatOllama(base_url=server.url, num_predict=12, **cold),
    }


@pytest.mark.parametrize("api", ["chat", "responses", "messages", "ollama"])
def test_langchain(server, said, api):
    chat = chats(server)[api]
    answer = chat.invoke(SAY)
    assert answer.text == said and answer.usage_metadata["output_tokens"] == 12
    assert "".join(chunk.text for chunk in chat.stream(SAY)) == said


@pytest.mark.parametrize("api, path", [("openai", "/v1"), ("anthropic", ""), ("ollama_chat", "")])
def test_litellm(server, said, api, path):
    ask = {"model": f"{api}/{server.model}", "messages": ASK, "api_base": server.url + path, "api_key": "none", "max_tokens": 12, "temperature": 0}
    # To Ollama it says by itself not what a body is, which the server wants to be told.
    ask["extra_headers"] = {"content-type": "application/json"}
    answer = litellm.completion(**ask)
    assert answer.choices[0].message.content == said and answer.usage.completion_tokens == 12
    chunks = litellm.completion(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
