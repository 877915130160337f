"""Hostile clients: crowds that are idle, drip or do not read, and bodies that are as much work as they can be.

The figures are printed as JSON, one line a test. Hostile clients are processes of their own and come from another
address (127.0.0.2), as they would; the cores are shared, so ratios are what counts.
"""

import asyncio
import json
import multiprocessing
import random
import resource
import socket
import time

import aiohttp
import pytest
from conftest import ENDLESS, Server

HOSTILE = "127.0.0.2"
SAID = {"messages": [{"role": "user", "content": "x"}]}
ASKS = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": SAID, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [5]},
        "/v1/messages": SAID, "/v1/responses": {"input": "x", "max_output_tokens": 1}, "/api/chat": {**SAID, "options": {"num_predict": 1}}}
ROUTES = list(ASKS)


def raise_file_limit():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def quantile(times, q):
    return round(1000 * sorted(times)[min(int(len(times) * q), len(times) - 1)], 1)


# Those who are served.


async def first_token(session, url, model, tokens=4):
    """Seconds to the first token of a short answer, or what went wrong."""
    ask = {"model": model, "stream": True, "max_tokens": tokens, "temperature": 0, **ENDLESS, "prompt": "Once upon a time"}
    start, first = time.monotonic(), None
    try:
        async with session.post(f"{url}/v1/completions", json=ask) as response:
            if response.status != 200:
                return response.status
            async for line in response.content:
                if first is None and line.startswith(b"data: {"):
                    first = time.monotonic() - start
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__
    return first


async def health(session, url):
    start = time.monotonic()
    try:
        async with session.get(f"{url}/health") as response:
            return time.monotonic() - start if response.status == 200 else response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__


async def served(url, model, clients, done, limit, pause=0.0):
    """What clients that ask again and again see until `done` says so, and what health checks do meanwhile."""
    tokens, checks, end = [], [], time.monotonic() + limit
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=30)

    async def client(ask, times, wait):
        while not done() and time.monotonic() < end:
            times.append(await ask())
            await asyncio.sleep(wait)

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        asks = [client(lambda: first_token(session, url, model), tokens, pause) for _ in range(clients)]
        await asyncio.gather(*asks, client(lambda: health(session, url), checks, 0.02))
    return tokens, checks


def figures(tokens, checks):
    good = [t for t in tokens if isinstance(t, float)]
    well = [t for t in checks if isinstance(t, float)]
    wrong = [str(t) for t in tokens + checks if not isinstance(t, float)]
    return {
        "answers": len(good), "wrong": {w: wrong.count(w) for w in sorted(set(wrong))},
        "ttft_ms": {"p50": quantile(good, 0.5), "p99": quantile(good, 0.99)} if good else None,
        "health_ms": {"p50": quantile(well, 0.5), "p99": quantile(well, 0.99), "most": quantile(well, 1)} if well else None,
    }


# Crowds of connections.


class Crowd:
    """Keeps up connections of three kinds; those that the server ends are opened anew, up to so many a second."""

    def __init__(self, port, idle, dripping, stalled):
        self.port, self.wanted = port, {"idle": idle, "dripping": dripping, "stalled": stalled}
        self.open = {kind: set() for kind in self.wanted}
        self.opened = 0

    async def connect(self, kind):
        sock = socket.socket()
        sock.setblocking(False)
        if kind == "stalled":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            sock.bind((HOSTILE, 0))
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
            if kind == "dripping":
                half = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                sock.send(half if self.opened % 2 else half + b"content-length: 100000\r\n\r\n")
            if kind == "stalled":
                sock.send(b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 200)
            self.open[kind].add(sock)
            self.opened += 1
        except OSError:
            sock.close()

    def drip(self, sock):
        """Sends a byte; whether the connection is still there."""
        try:
            sock.send(b"x")
            return True
        except BlockingIOError:
            return True
        except OSError:
            return False

    def ended(self, sock):
        try:
            return sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def keep(self, ready, stop):
        last = 0.0
        while not stop.is_set():
            for kind, socks in self.open.items():
                gone = [s for s in socks if kind != "stalled" and self.ended(s)]
                if kind == "dripping" and time.monotonic() > last + 2:
                    last = time.monotonic()
                    gone += [s for s in socks if s not in gone and not self.drip(s)]
                for s in gone:
                    socks.discard(s)
                    s.close()
                missing = self.wanted[kind] - len(socks)
                for _ in range(min(missing, 1000)):
                    await self.connect(kind)
            if not ready.is_set() and all(len(s) >= 0.95 * self.wanted[k] for k, s in self.open.items()):
                ready.set()
            await asyncio.sleep(1)
        for socks in self.open.values():
            for s in socks:
                s.close()


def crowd(port, sizes, ready, stop):
    raise_file_limit()
    asyncio.run(Crowd(port, *sizes).keep(ready, stop))


def slower(among, alone):
    """Whether the first token comes late: beyond twice the time, and what one hiccup of a machine takes."""
    among, alone = among["ttft_ms"]["p99"], alone["ttft_ms"]["p99"]
    return among > 2 * alone and among > alone + 50


def crowds(sizes, seconds, capsys):
    context = multiprocessing.get_context("spawn")
    with Server() as server:
        model = server.model

        def measure(done=lambda: False):
            return figures(*asyncio.run(served(server.url, model, 32, done, seconds)))

        measure()  # warm
        server.until_idle()
        start = server.rss()
        alone = measure()
        ready, stop = context.Event(), context.Event()
        process = context.Process(target=crowd, args=(server.port, sizes, ready, stop), daemon=True)
        process.start()
        came = ready.wait(60)
        among = measure()
        if slower(among, alone):
            # Once more: another program on this machine may have had the cores for a moment.
            among = measure()
        connections, most = server.get("/metrics")[2], server.rss()
        stop.set()
        process.join(30)
        process.kill()
        time.sleep(3)
        server.until_idle()
        end = server.rss()
        open_ = [line for line in connections.splitlines() if line.startswith("infernum:connections")]
        found = {
            "test": "crowds", "idle": sizes[0], "dripping": sizes[1], "stalled": sizes[2], "all_came": came, "alone": alone, "among": among,
            "p99_ratio": among["ttft_ms"] and round(among["ttft_ms"]["p99"] / alone["ttft_ms"]["p99"], 2),
            "rss_mib": {"start": round(start), "most": round(most), "end": round(end)}, "connections": open_,
        }
        with capsys.disabled():
            print("\n" + json.dumps(found))
        assert not among["wrong"] and among["answers"] > 0, "they are all served"
        assert not slower(among, alone), "a crowd that does nothing slows down others"
        assert end <= start + max(48, start * 0.15), "memory comes back"


def test_crowds(capsys):
    crowds((1000, 200, 200), 5, capsys)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_large_crowds(capsys):
    raise_file_limit()
    crowds((10_000, 2_000, 2_000), 20, capsys)


# Bodies.


def text(n, rng):
    return rng.choice(["0123456789", "a", " ", "é", "🙂", "\n", "ab ", "\\u0000"]) * n


KINDS = {
    "unknown fields": lambda ask, n, rng: ask | {f"f{i}": 1 for i in range(n // 10)},
    "long names": lambda ask, n, rng: ask | {"x" * (n // 4) + str(i): 1 for i in range(3)},
    "deep unknown": lambda ask, n, rng: Raw(ask, '"x":' + "[" * (n // 2) + "]" * (n // 2)),
    "deep objects": lambda ask, n, rng: Raw(ask, '"x":' + '{"a":' * (n // 6)),
    "long prompt": lambda ask, n, rng: ask | {"prompt": text(n // 10, rng)},
    "long message": lambda ask, n, rng: ask | {"messages": [{"role": "user", "content": text(n // 10, rng)}]},
    "many messages": lambda ask, n, rng: ask | {"messages": [{"role": "user", "content": "x"}] * (n // 35)},
    "many parts": lambda ask, n, rng: ask | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * (n // 30)}]},
    "wide message": lambda ask, n, rng: ask | {"messages": [{"role": "user", "content": "x"} | {f"k{i}": i for i in range(n // 15)}]},
    "many prompts": lambda ask, n, rng: ask | {"prompt": ["x"] * (n // 5)},
    "many tokens": lambda ask, n, rng: ask | {"prompt": [5] * (n // 3), "tokens": [5] * (n // 3)},
    "token lists": lambda ask, n, rng: ask | {"prompt": [[5, 6]] * (n // 8)},
    "long stops": lambda ask, n, rng: ask | {"stop": ["a" * (n // 4)] * 4},
    "many stops": lambda ask, n, rng: ask | {"stop": [f"s{i}" for i in range(n // 10)]},
    "biases": lambda ask, n, rng: ask | {"logit_bias": {f"{i:07}": 1 for i in range(n // 13)}},
    "many tools": lambda ask, n, rng: ask | {"tools": [{"type": "function", "function": {"name": "f"}}] * (n // 50)},
    "template variables": lambda ask, n, rng: ask | {"chat_template_kwargs": {f"v{i}": [1, 2] for i in range(n // 15)}},
    "long salt": lambda ask, n, rng: ask | {"cache_salt": "s" * (n // 2), "user": "u" * (n // 2)},
    "big numbers": lambda ask, n, rng: Raw(ask, '"seed":' + "9" * n),
    "not JSON": lambda ask, n, rng: Raw(ask, rng.choice(['"x":"' + "\\ud800" * (n // 6), "\x00" * n, '"' * n, "," * n])),
}


class Raw:
    """An object with something at its end that may not be JSON."""

    def __init__(self, ask, rest):
        self.text = json.dumps(ask)[:-1] + "," + rest + "}"


def body(kind, variation, model):
    rng = random.Random(f"{kind} {variation}")
    size = int(4_000_000 * rng.choice([0.01, 0.1, 0.5, 0.95]))
    route = ROUTES[variation % len(ROUTES)]
    ask = {"model": model, "max_tokens": 1, **ASKS[route]}
    made = KINDS[kind](ask, size, rng)
    return route, (made.text if isinstance(made, Raw) else json.dumps(made)).encode()[: 4 << 20]


def attack(url, model, variations, at_once, seconds, queue):
    """Sends all, so many at a time; puts how often each kind was answered how, and the longest time."""

    async def all_():
        found, slowest, gate, end = {}, {}, asyncio.Semaphore(at_once), time.monotonic() + seconds

        async def send(session, kind, variation):
            async with gate:
                if time.monotonic() > end:
                    status = "not sent"
                else:
                    route, data = body(kind, variation, model)
                    start = time.monotonic()
                    try:
                        async with session.post(url + route, data=data, headers={"content-type": "application/json"}) as response:
                            await response.read()
                            status = str(response.status)
                    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                        status = type(error).__name__
                    slowest[kind] = max(slowest.get(kind, 0), round(time.monotonic() - start, 2))
                counts = found.setdefault(kind, {})
                counts[status] = counts.get(status, 0) + 1

        connector = aiohttp.TCPConnector(limit=0, local_addr=(HOSTILE, 0), force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
            await asyncio.gather(*(send(session, kind, v) for v in range(variations) for kind in KINDS))
        return found, slowest

    queue.put(asyncio.run(all_()))


def bodies(variations, at_once, limit, capsys):
    context = multiprocessing.get_context("spawn")
    with Server() as server:
        model = server.model
        alone = figures(*asyncio.run(served(server.url, model, 1, lambda: False, 4, 0.01)))
        queue = context.Queue()
        process = context.Process(target=attack, args=(server.url, model, variations, at_once, limit, queue), daemon=True)
        process.start()
        answered = []

        def done():
            if not answered and not queue.empty():
                answered.append(queue.get())
            return bool(answered) or not process.is_alive()

        among = figures(*asyncio.run(served(server.url, model, 1, done, limit + 90, 0.01)))
        process.kill()
        statuses, slowest = answered[0] if answered else ({}, {})
        ratio = among["ttft_ms"] and round(among["ttft_ms"]["p50"] / alone["ttft_ms"]["p50"], 2)
        found = {"test": "bodies", "bodies": variations * len(KINDS), "at_once": at_once, "alone": alone, "among": among, "p50_ratio": ratio,
                 "statuses": statuses, "slowest_s": slowest}
        with capsys.disabled():
            print("\n" + json.dumps(found))
        assert answered, "all were answered"
        server.until_idle(60)
        sent = {status for counts in statuses.values() for status in counts}
        assert sent <= {"200", "400", "404", "413", "422", "429", "503"}, sent
        assert not among["wrong"] and among["answers"] > 0
        assert among["health_ms"]["p99"] < 100, "health is told at once"
        assert ratio <= 2 or among["ttft_ms"]["p50"] < alone["ttft_ms"]["p50"] + 20


def test_bodies(capsys):
    bodies(1, 8, 30, capsys)


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_a_thousand_bodies(capsys):
    bodies(50, 32, 600, capsys)
