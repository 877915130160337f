"""Crowds: many clients at once, some of whom leave, and more of them than can be served."""

import asyncio
import json
import random
import statistics
import time

import aiohttp
import pytest
from conftest import ENDLESS, Server


# Tokens of an answer where the load is measured: enough that the clients, on the same cores, are not what counts.
LONG = 192


def body(model, rng, tokens):
    return {"model": model, "stream": True, "max_tokens": tokens, "temperature": 0.8, "seed": rng.randrange(1000),
            **ENDLESS, "messages": [{"role": "user", "content": "Tell me about " + " ".join(rng.choices(["cats", "dogs", "rain", "the sea", "a king"], k=rng.randrange(1, 40)))}]}


async def one(session, url, request, leave_after=None):
    """Streams one answer: `ok`, `left`, the refusing status, or what went wrong."""
    text, finished, events = "", None, 0
    try:
        async with session.post(f"{url}/v1/chat/completions", json=request) as response:
            if response.status != 200:
                await response.read()
                after = response.headers.get("retry-after", "")
                return response.status if after.isdigit() and int(after) > 0 else f"{response.status} without retry-after"
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]\n":
                    return "ok" if finished == "length" and text else f"ended by {finished}"
                event = json.loads(line[6:])
                if "error" in event:
                    return f"error in the stream: {event['error']['message']}"
                events += 1
                text += event["choices"][0]["delta"].get("content") or ""
                finished = event["choices"][0]["finish_reason"] or finished
                if events == leave_after:
                    return "left"  # the connection is closed, not put back
        return "no [DONE]"
    except aiohttp.ClientError as error:
        return f"{type(error).__name__}: {error}"


def session():
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=120))


async def crowd(server, model, clients, seed):
    rng = random.Random(seed)
    leavers = set(rng.sample(range(clients), clients // 10))
    async with session() as s:
        asks = [one(s, server.url, body(model, rng, rng.randrange(8, 33)), rng.randrange(1, 8) if i in leavers else None) for i in range(clients)]
        return await asyncio.gather(*asks)


def count(outcomes):
    return {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes), key=str)}


def rounds(server, clients, times):
    """Resident memory after each round."""
    model, memory = server.model, []
    for seed in range(times):
        start = time.monotonic()
        outcomes = count(asyncio.run(crowd(server, model, clients, seed)))
        server.until_idle(20)
        memory.append(server.rss())
        print(f"round {seed}: {outcomes}, {time.monotonic() - start:.1f} s, {memory[-1]:.1f} MiB")
        assert outcomes == {"left": clients // 10, "ok": clients - clients // 10}
    return memory


def test_five_hundred_clients(capsys):
    with Server() as server, capsys.disabled():
        memory = rounds(server, 500, 6)
    # The first rounds fill caches and the allocator's pools, those of each thread.
    assert max(memory[3:]) <= memory[2] + max(16, memory[2] * 0.05), f"memory grows: {memory}"


@pytest.mark.heavy
@pytest.mark.timeout(4000)
def test_five_hundred_clients_for_long(capsys):
    with Server() as server, capsys.disabled():
        memory = rounds(server, 500, 30)
    assert statistics.mean(memory[-5:]) <= statistics.mean(memory[5:10]) + max(8, memory[5] * 0.02), f"memory grows: {memory}"


def rate(done):
    """Good answers a second, up to the last."""
    times = [at for at, outcome in done if outcome == "ok"]
    return len(times) / max(times)


async def closed(server, model, clients, seconds):
    """Answers a second where `clients` ask again as soon as they are answered."""
    start, done, rng = time.monotonic(), [], random.Random(1)

    async def client(s):
        while time.monotonic() < start + seconds:
            outcome = await one(s, server.url, body(model, rng, LONG))
            done.append((time.monotonic() - start, outcome))

    async with session() as s:
        await asyncio.gather(*(client(s) for _ in range(clients)))
    assert {o for _, o in done} == {"ok"}, count([o for _, o in done])
    return rate(done)


async def open_loop(server, model, arrivals, seconds):
    """The same where `arrivals` requests a second come, whatever becomes of those before them."""
    done, rng, start = [], random.Random(2), time.monotonic()

    async def arrive(s, at):
        await asyncio.sleep(at)
        outcome = await one(s, server.url, body(model, rng, LONG))
        done.append((time.monotonic() - start, outcome))

    async with session() as s:
        await asyncio.gather(*(arrive(s, rng.uniform(0, seconds)) for _ in range(int(arrivals * seconds))))
    return rate(done), count([o for _, o in done])


def overload(seconds, capsys):
    with Server("--max-sequences", "8", "--queue", "8") as server:
        model = server.model
        asyncio.run(closed(server, model, 8, 1))  # warm
        normal = asyncio.run(closed(server, model, 12, seconds))
        good, outcomes = asyncio.run(open_loop(server, model, 10 * normal, seconds))
        server.until_idle()
        assert asyncio.run(closed(server, model, 4, 1)) > 0, "and then all is as before"
    with capsys.disabled():
        print(f"\nnormal {normal:.1f}/s, at ten times that {good:.1f}/s good ({good / normal:.2f}); {outcomes}")
    assert set(outcomes) <= {"ok", 429, 503}, "refused as told, with Retry-After, and nothing else"
    assert sum(n for o, n in outcomes.items() if o != "ok") > outcomes["ok"], "it was an overload"
    assert good >= 0.6 * normal, "what is taken is served as fast as ever (the clients use the same cores)"


def test_overload(capsys):
    overload(8, capsys)


@pytest.mark.heavy
@pytest.mark.timeout(4000)
def test_overload_for_long(capsys):
    overload(60, capsys)


def test_the_openai_client_understands_a_full_queue():
    import openai

    with Server("--max-sequences", "1", "--queue", "1") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        ask = {"model": server.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000, "extra_body": ENDLESS}
        with client.chat.completions.create(**ask, stream=True) as stream:
            next(stream)
            asyncio.run(fill(server, ask, client))
        server.until_idle()


async def fill(server, ask, client):
    """One more waits; the next is refused."""
    import openai

    async with session() as s:
        waiting = asyncio.create_task(one(s, server.url, {**ask, **ENDLESS, "stream": True}, leave_after=1))
        while not server.metric("num_requests_waiting"):
            assert not waiting.done(), "the running request ended first"
            await asyncio.sleep(0.01)
        with pytest.raises((openai.RateLimitError, openai.InternalServerError)) as error:
            await asyncio.to_thread(client.chat.completions.create, **ask)
        assert error.value.status_code in (429, 503) and int(error.value.response.headers["retry-after"]) >= 1
        assert set(error.value.body) == {"message", "type", "param", "code"}
        waiting.cancel()
