"""The chat page in headless Chromium: against the server, and against one that misbehaves."""

import os
import time

import pytest
from browser import CHROMIUM, Browser
from mock import CODE, HOSTILE, Mock

LAST = "[...document.querySelectorAll('.answer')].at(-1)"
ENDED = f"{LAST}?.dataset.end"
TEXT = f"{LAST}.querySelector('.text').innerText"
STATS = f"{LAST}.querySelector('.stats').textContent"


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM:
        message = "no Chromium: the chat page is not tested"
        pytest.fail(message) if os.environ.get("INFERNUM_NEEDS_BROWSER") else pytest.skip(message)
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def mock(browser):
    mock = Mock()
    fresh(browser, mock.url)
    yield mock
    mock.shutdown()


def fresh(browser, url):
    browser.errors.clear()
    browser.requests.clear()
    browser.open(url)
    browser.until("document.querySelector('#model').options.length > 0")


def say(browser, text):
    browser.type("#prompt", text)
    browser.key("Enter")


def shot(browser, name, **how):
    """A picture to look at, where one is asked for."""
    if folder := os.environ.get("INFERNUM_SCREENSHOTS"):
        browser.screenshot(f"{folder}/{name}.png", **how)


def test_a_real_answer_streams_and_stops(browser, server):
    fresh(browser, server.url)
    shot(browser, "empty")
    shot(browser, "empty-dark", dark=True)
    assert browser.js("document.querySelector('#model').value") == server.model
    assert browser.js("document.activeElement.id") == "prompt"
    browser.click("#toggle")
    for name, value in {"temperature": 0, "max_tokens": 200, "seed": 7}.items():
        browser.type(f"#{name}", str(value))
    say(browser, "Once upon a time")
    end = browser.until(ENDED)
    assert end in ("stop", "length") and browser.js(TEXT).strip()
    first = browser.js(TEXT)
    assert "tokens/s" in browser.js(STATS) and "first after" in browser.js(STATS)
    # The same again: greedy, so the same words.
    browser.click(".again")
    assert browser.until(ENDED) == end and browser.js(TEXT) == first
    shot(browser, "answer")
    shot(browser, "answer-dark", dark=True)

    # A long one: text is there before it ends, grows, and stops growing at the button.
    browser.type("#max_tokens", "1500")
    browser.type("#temperature", "1")
    browser.click("#new")
    for attempt in range(8):  # a model may end by itself before the button is pressed
        browser.type("#seed", str(attempt))
        say(browser, "Tell me a long story")
        early = browser.until(f"{TEXT}.length > 10 && {TEXT}")
        browser.until(f"{ENDED} || {TEXT}.length > {len(early)}")
        browser.click("#stop")
        if browser.until(ENDED) == "stopped":
            break
        browser.click("#new")
    assert browser.js(ENDED) == "stopped" and "stopped" in browser.js(STATS)
    stopped = browser.js(TEXT)
    time.sleep(0.5)
    assert browser.js(TEXT) == stopped and len(stopped) > 10
    server.until_idle()  # the server has noticed too
    # It goes on from there: the stopped answer is part of what the model is told.
    browser.type("#max_tokens", "4")
    say(browser, "And then?")
    assert browser.until(ENDED) in ("stop", "length")
    assert browser.errors == []
    assert all(url.startswith((server.url, "data:")) for url in browser.requests), "nothing from outside"


def test_what_is_sent(browser, mock):
    browser.click("#toggle")
    for name, value in {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "max_tokens": "12", "seed": "3"}.items():
        browser.type(f"#{name}", value)
    say(browser, "one")
    browser.until(ENDED)
    assert mock.bodies[-1] == {
        "model": "one", "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}],
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 12, "seed": 3,
    }
    assert browser.js(STATS).startswith("42 tokens"), "the server's count, not that of the chunks"
    browser.type("#prompt", "two")
    browser.key("Enter", shift=True)
    browser.call("Input.insertText", text="lines")
    browser.key("Enter")
    browser.until("document.querySelectorAll('.answer').length === 2")
    browser.until(ENDED)
    turns = [(m["role"], m["content"]) for m in mock.bodies[-1]["messages"]]
    assert turns == [("system", "Be brief."), ("user", "one"), ("assistant", "You said: one"), ("user", "two\nlines")]
    # Settings outlive the page; the conversation does not.
    fresh(browser, mock.url)
    assert browser.js("document.querySelector('#temperature').value") == "0.5"
    assert browser.js("document.querySelectorAll('.answer').length") == 0
    # What is out of range is not sent.
    browser.click("#toggle")
    browser.type("#temperature", "9")
    count = len(mock.bodies)
    say(browser, "three")
    assert browser.js("document.activeElement.id") == "temperature" and len(mock.bodies) == count
    browser.js("localStorage.clear()")


def test_text_stays_text(browser, mock):
    say(browser, "hostile")
    browser.until(ENDED)
    assert browser.js(f"{LAST}.querySelector('.text').textContent") == HOSTILE
    say(browser, "<i>me</i><img src=x onerror=\"document.title='owned'\">")
    browser.until("document.querySelectorAll('.answer').length === 2")
    browser.until(ENDED)
    assert browser.js("document.querySelectorAll('#log img, #log script, #log b, #log i').length") == 0
    assert browser.js("document.querySelector('#model').options[1].text") == "two <b>"
    say(browser, "code")
    browser.until("document.querySelectorAll('.answer').length === 3")
    browser.until(ENDED)
    assert browser.js(f"{LAST}.querySelector('code').textContent") == CODE.split("rust\n")[1].split("\n```")[0]
    assert browser.js(f"{LAST}.querySelector('figcaption span').textContent") == "rust"
    assert "and `that` is it." in browser.js(TEXT)
    shot(browser, "code")
    shot(browser, "code-dark-narrow", dark=True, width=420, height=800)
    assert browser.js("document.title") == "Infernum" and browser.errors == []


def test_errors_are_shown(browser, mock):
    say(browser, "full")
    assert browser.until(ENDED) == "failed"
    shown = browser.js(f"{LAST}.innerText")
    assert "The queue is full" in shown and "Try again in 7 s" in shown
    say(browser, "break")
    browser.until("document.querySelectorAll('.answer').length === 2")
    assert browser.until(ENDED) == "failed"
    shown = browser.js(f"{LAST}.innerText")
    assert "You said: break" in shown and "The device is lost" in shown, "what came is kept"
    shot(browser, "errors")
    # A question that got no answer is not part of the next request.
    assert [m["content"] for m in mock.bodies[-1]["messages"]] == ["break"]
    say(browser, "hang up")
    browser.until("document.querySelectorAll('.answer').length === 3")
    assert browser.until(ENDED) == "failed" and "cannot be reached" in browser.js(f"{LAST}.innerText")


def test_stop_closes_the_connection(browser, mock):
    say(browser, "forever")
    browser.until(f"{LAST}.innerText.includes('20 ')")
    assert browser.js("document.querySelector('#send').hidden && !document.querySelector('#stop').hidden")
    browser.key("Escape")
    assert browser.until(ENDED) == "stopped"
    for _ in range(100):
        if mock.ended:
            break
        time.sleep(0.05)
    assert mock.ended == ["disconnected"]
    browser.click("#new")
    assert browser.js("document.querySelectorAll('.answer').length") == 0
    assert browser.js("!document.querySelector('#welcome').hidden")


def test_a_key_is_asked_for_and_kept(browser):
    mock = Mock(key="secret")
    browser.open(mock.url)
    browser.until("!document.querySelector('#problem').hidden")
    assert "API key" in browser.js("document.querySelector('#problem').innerText")
    assert browser.js("document.activeElement.id") == "key"
    shot(browser, "key")
    browser.type("#key", "secret")
    browser.key("Enter")
    browser.until("document.querySelector('#model').options.length === 2")
    assert browser.js("document.querySelector('#problem').hidden")
    say(browser, "hello")
    assert browser.until(ENDED) == "stop"
    fresh(browser, mock.url)  # the key is still there
    browser.js("localStorage.clear()")
    mock.shutdown()


def test_a_browser_may_log_in(browser, keyed):
    fresh(browser, keyed.url.replace("//", "//me:secret-1@"))
    browser.click("#toggle")
    browser.type("#max_tokens", "3")
    say(browser, "Hello")
    assert browser.until(ENDED) in ("stop", "length") and browser.errors == []
    browser.js("localStorage.clear()")


def test_everything_has_a_place(browser, mock):
    boxes = """['header', 'main', 'footer'].map((n) => document.querySelector(n).getBoundingClientRect()).map((r) =>
        [r.left, r.right, r.top, r.bottom].map(Math.round))"""
    for width, settings in [(1100, False), (1100, True), (420, False)]:
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1, mobile=False)
        browser.js(f"settings({str(settings).lower()})")
        header, main, footer = browser.js(boxes)
        assert header[:2] == [0, width] and footer[3] == 700
        assert main[:2] == footer[:2] == [0, width - (304 if settings else 0)]
        assert main[2] == header[3] and footer[2] == main[3], "one under the other"
    browser.call("Emulation.clearDeviceMetricsOverride")


def test_everything_has_a_name(browser, mock):
    unnamed = browser.js("""[...document.querySelectorAll('button, input, select, textarea')].filter((e) =>
        !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.id)""")
    assert unnamed == []
    assert browser.js("document.documentElement.lang") == "en"
    assert browser.js("document.querySelectorAll('[src]:not([src^=data]), link:not([href^=data])').length") == 0
