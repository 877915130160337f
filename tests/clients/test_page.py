"""The pages in headless Chromium: that to chat on against the server, and against one that misbehaves; that of the API,
whose examples are run; that of what was compiled."""

import json
import os
import subprocess
import sys
import time

import pytest
from browser import CHROMIUM, Browser
from conftest import BINARY, ROOT
from mock import CODE, HOSTILE, Mock, page

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


@pytest.fixture(autouse=True)
def forgotten(request):
    """What the page keeps is of one test."""
    yield
    if "browser" in request.fixturenames:
        request.getfixturevalue("browser").js("localStorage.clear()")


def fresh(browser, url):
    browser.errors.clear()
    browser.requests.clear()
    browser.open(url)
    browser.until("document.querySelector('#model').options.length > 0")


def say(browser, text):
    browser.type("#prompt", text)
    browser.key("Enter")


def answers(browser, count):
    """Waits until so many answers are seen and the last has ended; how it did."""
    browser.until(f"document.querySelectorAll('.answer').length === {count}")
    return browser.until(ENDED)


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
    # Settings outlive the page; a page that is opened anew begins a new conversation.
    fresh(browser, mock.url)
    assert browser.js("document.querySelector('#temperature').value") == "0.5"
    assert browser.js("document.querySelectorAll('.answer').length") == 0
    # What is out of range is not sent.
    browser.click("#toggle")
    browser.type("#temperature", "9")
    count = len(mock.bodies)
    say(browser, "three")
    assert browser.js("document.activeElement.id") == "temperature" and len(mock.bodies) == count


def test_text_stays_text(browser, mock):
    say(browser, "hostile")
    browser.until(ENDED)
    assert browser.js(f"{LAST}.querySelector('.text').textContent") == HOSTILE
    say(browser, "<i>me</i><img src=x onerror=\"document.title='owned'\">")
    browser.until("document.querySelectorAll('.answer').length === 2")
    browser.until(ENDED)
    assert browser.js(DANGEROUS) == 0
    assert browser.js("document.querySelector('#model').options[1].text") == "two <b>"
    say(browser, "code")
    browser.until("document.querySelectorAll('.answer').length === 3")
    browser.until(ENDED)
    assert browser.js(f"{LAST}.querySelector('code').textContent") == CODE.split("rust\n")[1].split("\n```")[0]
    assert browser.js(f"{LAST}.querySelector('figcaption span').textContent") == "rust"
    assert "and that is it." in browser.js(TEXT)
    shot(browser, "code")
    shot(browser, "code-dark-narrow", dark=True, width=420, height=800)
    assert browser.js("document.title") == "Infernum" and browser.errors == []


EVIL = [
    "[x](javascript:document.title='owned')", "[x](JaVaScRiPt:document.title='owned')", "[x](java&#10;script:alert(1))",
    "[x](<java\tscript:alert(1)>)", "[x](vbscript:x)", "[x](data:text/html,<script>alert(1)</script>)", "[x](file:///etc/passwd)",
    "[x](blob:https://x/y)", "![x](javascript:alert(1))", "![x](https://example.com/spy.png)", "<javascript:alert(1)>",
    "[x](https://example.com\" onclick=\"document.title='owned')", "[a](https://a.example/'onmouseover='x')", "https://a.example/\"onclick=x",
    "<a href=\"javascript:alert(1)\">x</a>", "<iframe srcdoc='<script>parent.document.title=1</script>'>", "<svg onload=alert(1)>", "<style>*{display:none}</style>",
    "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| <svg/onload=alert(1)> | [x](javascript:alert(1)) |",
    "# <img src=x onerror=alert(1)>", "> <img src=x onerror=alert(1)>", "- <img src=x onerror=alert(1)>", "**<img src=x onerror=alert(1)>**",
    "```\"><img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>\n```", "[<img src=x onerror=alert(1)>](https://example.com)",
]
# What no text of a model may become: elements that Markdown does not name, attributes that run, links that do.
DANGEROUS = """[...document.querySelectorAll('#log *')].filter((e) =>
    /^(img|script|b|i|iframe|object|embed|svg|style|link|meta|base|input|video|audio|math)$/i.test(e.tagName)
    || [...e.attributes].some((a) => a.name.startsWith('on') || ['src', 'srcdoc', 'style'].includes(a.name) && !/^(text-align: \\w*;)?$/.test(a.value))
    || e.tagName === 'A' && (!/^(https?|mailto):$/.test(e.protocol) || e.rel !== 'noopener noreferrer')).length"""


def test_no_markup_of_a_model_runs(browser, mock):
    for count, evil in enumerate(EVIL, 1):
        browser.type("#prompt", "echo " + evil)
        browser.key("Enter")
        assert answers(browser, count) == "stop", evil
        assert browser.js(DANGEROUS) == 0, evil
    browser.js("document.querySelectorAll('#log a').forEach((a) => a.dispatchEvent(new MouseEvent('mouseover', {bubbles: true})))")
    links = browser.js("[...document.querySelectorAll('#log a')].map((a) => a.href)")
    assert links and all(link.startswith("https://") for link in links), links
    assert browser.js("document.title") == "Infernum" and browser.errors == []
    assert all(url.startswith((mock.url, "data:")) for url in browser.requests), "nothing is fetched for a model"
    # If a text did become markup, the browser would refuse: the policy knows this page's scripts by their hashes.
    assert "TrustedHTML" in browser.js("try { document.body.innerHTML = '<p>x'; 'set' } catch (e) { e.message }")
    browser.js("""try {
        const made = document.createElement('div');
        made.setAttribute('onclick', "document.title = 'owned'");
        made.click();
    } catch { /* refused at once */ }""")
    assert browser.js("document.title") == "Infernum"
    browser.errors.clear()


def test_markdown_is_drawn(browser, mock):
    say(browser, "markdown")
    assert answers(browser, 1) == "stop"
    inner = lambda css: browser.js(f"[...{LAST}.querySelectorAll({css!r})].map((e) => e.innerText)")
    assert inner(".text > h2") == ["A heading with code"] and inner("h3") == ["Rows that do not fit"]
    assert inner(".text > p > strong") == ["bold", "both"] and inner("em") == ["heading", "slanted", "both", "em"] and inner("del") == ["struck"]
    assert inner("p > code") == ["a * b"]
    links = browser.js(f"[...{LAST}.querySelectorAll('a')].map((a) => [a.innerText, a.href])")
    assert links == [["the docs", "https://example.com/a_(b)?c=1&d"], ["https://example.org/path_x"] * 2,
                     ["https://example.net", "https://example.net/"]]
    text = browser.js(TEXT)
    assert "snake_case_names kept" in text and "2 * 3 * 4 kept, and *escaped*" in text
    assert browser.js(f"[...{LAST}.querySelectorAll('.text > ol > li')].length") == 3
    assert inner("ol ul > li")[0] == "nested one" and inner("ol ul > li > p") == ["a second paragraph"]
    assert browser.js(f"[...{LAST}.querySelectorAll('pre code')].map((c) => c.textContent)")[0] == 'def f(x):\n    return x < 1 and "```"'
    assert inner("figcaption span") == ["python", "rust"]
    assert inner(".text > ul > li") == ["☑ done", "☐ to do"]
    assert inner("blockquote > p") == ["A quote"] and inner("blockquote li") == ["with a list"]
    assert inner("th") == ["Name", "Value", "Both"] and inner("td")[:3] == ["a|b", "1", "<b>x</b>"] and inner("td")[4] == "2\n3"
    assert browser.js(f"{LAST}.querySelectorAll('td')[1].style.textAlign") == "right"
    # What is copied is the code itself.
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.js(f"{LAST}.querySelector('figure button').click()")
    browser.until(f"{LAST}.querySelector('figure button').textContent === 'Copied'")
    assert browser.js("navigator.clipboard.readText()") == 'def f(x):\n    return x < 1 and "```"'
    browser.js("document.querySelector('#scroll').scrollTop = 0")
    for width, height in [(1280, 800), (390, 844)]:
        for dark in (False, True):
            shot(browser, f"markdown-{width}{'-dark' if dark else ''}", dark=dark, width=width, height=height)
    browser.call("Emulation.clearDeviceMetricsOverride")


def test_what_was_drawn_stays_while_an_answer_grows(browser, mock):
    """A block that is complete is not drawn anew: what is selected in it stays so."""
    kept = browser.js("""(() => {
        const into = document.createElement('div');
        drawMarkdown(into, '# One\\n\\n- a\\n\\npara');
        const before = [...into.children];
        drawMarkdown(into, '# One\\n\\n- a\\n\\nparagraph\\n\\n```\\nx');
        return [...into.children].map((e, i) => e === before[i]);
    })()""")
    assert kept == [True, True, False, False]


@pytest.mark.parametrize("text", [
    "'['.repeat(n)", "'*'.repeat(n)", "'*a '.repeat(n)", "'a* '.repeat(n)", "'**a *b '.repeat(n)", "'_a_'.repeat(n)", "'[x]'.repeat(n)",
    "'[a]('.repeat(n)", "'](x '.repeat(n)", "'![['.repeat(n)", "'>'.repeat(n)", "'> '.repeat(n)", "'- '.repeat(n)", "'1. '.repeat(n)",
    "'- a\\n'.repeat(n)", "'> a\\n'.repeat(n)", "'| a '.repeat(n)", "'|a|b|\\n'.repeat(n)", "'|a|\\n|-|\\n'.repeat(n)", "'`'.repeat(n)",
    "[...Array(700).keys()].map((i) => '`'.repeat(i) + ' ').join('')", "'` '.repeat(n)", "'` '.repeat(n) + 'a'", "'``` '.repeat(n) + '`'", "' '.repeat(n) + '|'", "' '.repeat(n)",
    "'```' + ' '.repeat(n) + '`'", "'# ' + ' #'.repeat(n) + 'x'", "'- '.repeat(n) + 'x'", "'---'.repeat(n) + ' x'", "'http://'.repeat(n)",
    "'http://a' + '.'.repeat(n)", "'http://' + '('.repeat(n)", "'<'.repeat(n)", "'<http://'.repeat(n)", "'\\\\'.repeat(n)",
    "'`' + ' '.repeat(n) + 'x`'", "'a\\n'.repeat(n)", "Array.from({ length: 300 }, (_, i) => ' '.repeat(2 * i) + '- x').join('\\n')", "'~~a~ '.repeat(n)",
])
def test_no_text_takes_long_to_draw(browser, mock, text):
    took = browser.js(f"""(() => {{
        const n = 30000, into = document.createElement('div'), start = performance.now();
        drawMarkdown(into, {text});
        return performance.now() - start;
    }})()""")
    assert took < 3000, f"{took} ms"


def test_thoughts_and_calls_are_folded(browser, mock):
    say(browser, "think")
    assert answers(browser, 1) == "stop"
    assert browser.js(TEXT) == "You said: think"
    assert browser.js(f"{LAST}.querySelector('details').open") is False
    assert browser.js(f"{LAST}.querySelector('summary').innerText") == "Thoughts"
    assert browser.js(f"{LAST}.querySelector('.thoughts').textContent") == "Let me see."
    assert browser.js(f"{LAST}.querySelector('.thoughts strong').textContent") == "see"
    browser.click("#toggle")
    browser.type("#tools", "[{]")
    say(browser, "call")
    assert browser.js("document.activeElement.id") == "tools" and len(mock.bodies) == 1, "what is no list is not sent"
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    browser.type("#tools", json.dumps([weather]))
    browser.type("#prompt", "call")
    browser.key("Enter")
    assert answers(browser, 2) == "tool_calls"
    assert mock.bodies[-1]["tools"] == [weather]
    assert [m["content"] for m in mock.bodies[-1]["messages"]] == ["think", "You said: think", "call"], "thoughts are no part of it"
    shown = browser.js(f"[...{LAST}.querySelectorAll('.calls details')].map((d) => [d.open, d.querySelector('code').textContent, d.querySelector('pre').textContent])")
    assert shown == [[False, "weather", '{\n  "city": "<b>Oslo</b>"\n}'], [False, "time", '{"zone"']]
    browser.click("#toggle")
    shot(browser, "calls")
    shot(browser, "calls-dark-390", dark=True, width=390, height=844)
    browser.call("Emulation.clearDeviceMetricsOverride")
    # Their results go on with it.
    browser.type(f".results label:nth-of-type(1) textarea", "rain")
    browser.type(f".results label:nth-of-type(2) textarea", "noon")
    browser.key("Enter")
    assert answers(browser, 3) == "stop"
    sent = mock.bodies[-1]["messages"][-3:]
    assert sent[0]["role"] == "assistant" and sent[0]["reasoning_content"] == "Let me **see**."
    assert [c["function"] for c in sent[0]["tool_calls"]] == [{"name": "weather", "arguments": '{"city": "<b>Oslo</b>"}'}, {"name": "time", "arguments": '{"zone"'}]
    assert sent[1:] == [{"role": "tool", "tool_call_id": f"call_{i}", "content": text} for i, text in enumerate(["rain", "noon"])]
    assert browser.js("document.querySelectorAll('.results').length") == 0
    assert browser.errors == []


def contents(mock):
    return [m["content"] for m in mock.bodies[-1]["messages"]]


def test_editing_and_retrying_anywhere(browser, mock):
    for count, text in enumerate(["one", "two", "three"], 1):
        say(browser, text)
        answers(browser, count)
    # The first message is edited: what came after is another branch, which stays.
    browser.js("document.querySelectorAll('.edit')[0].click()")
    assert browser.js("document.activeElement.value") == "one"
    browser.key("Escape")
    assert browser.js("document.querySelector('.said').textContent") == "one", "Escape leaves it as it is"
    browser.js("document.querySelectorAll('.edit')[0].click()")
    browser.type(".asked textarea", "uno")
    browser.key("Enter")
    assert answers(browser, 1) == "stop" and contents(mock) == ["uno"]
    assert browser.js("document.querySelector('.turn').textContent") == "‹2/2›"
    say(browser, "due")
    assert answers(browser, 2) == "stop" and contents(mock) == ["uno", "You said: uno", "due"]
    turn = lambda at, by: browser.js(f"document.querySelectorAll('.answer')[{at}].querySelectorAll('.turn button')[{by}].click()")
    turn(0, 0)
    said = "[...document.querySelectorAll('.said')].map((e) => e.textContent)"
    assert browser.js(said) == ["one", "two", "three"]
    # An answer in the middle is tried again; the model is told what came before it only.
    browser.js("document.querySelectorAll('.again')[1].click()")
    assert answers(browser, 2) == "stop" and contents(mock) == ["one", "You said: one", "two"]
    turn(0, 1)
    assert browser.js(said) == ["uno", "due"]
    # Of one that failed, no branch stays.
    say(browser, "full")
    assert answers(browser, 3) == "failed"
    browser.click(f".answer:nth-last-child(1) .again")
    assert answers(browser, 3) == "failed" and browser.js(f"{LAST}.querySelector('.turn')") is None


def test_one_is_stopped_by_whatever_comes_next(browser, mock):
    say(browser, "one")
    answers(browser, 1)
    say(browser, "forever")
    browser.until(f"{LAST}.innerText.includes('20 ')")
    browser.js("document.querySelectorAll('.again')[0].click()")  # an answer before it
    assert answers(browser, 1) == "stop"
    wait(lambda: "disconnected" in mock.ended)
    assert contents(mock) == ["one"]
    assert browser.js("!document.querySelector('#send').hidden && document.querySelector('#stop').hidden")


def wait(ready):
    for _ in range(100):
        if ready():
            return
        time.sleep(0.05)
    raise AssertionError("not within 5 s")


def test_conversations_survive(browser, mock):
    say(browser, "first <b>one</b>")
    answers(browser, 1)
    say(browser, "think")
    answers(browser, 2)
    shown = browser.js("document.querySelector('#log').innerText")
    address = browser.js("location.href")
    browser.call("Page.reload")
    browser.until("document.readyState === 'complete' && document.querySelectorAll('.answer').length === 2")
    assert browser.js("document.querySelector('#log').innerText") == shown
    say(browser, "more")
    answers(browser, 3)
    assert contents(mock) == ["first <b>one</b>", "You said: first <b>one</b>", "think", "You said: think", "more"]

    # Another goes on while one looks at the first, and is kept where the page ends in the midst of it.
    browser.click("#new")
    assert browser.js("location.hash") == "" and browser.js("!document.querySelector('#welcome').hidden")
    say(browser, "forever")
    browser.until(f"{LAST}.innerText.includes('20 ')")
    browser.click("#list")
    titles = "[...document.querySelectorAll('#kept a')].map((a) => a.textContent)"
    assert browser.js(titles) == ["forever", "first <b>one</b>"]
    shot(browser, "list")
    browser.js("document.querySelectorAll('#kept a')[1].click()")
    browser.until("document.querySelectorAll('.answer').length === 3")
    assert browser.js("location.href") == address and not mock.ended[3:], "it was not stopped"
    browser.js("document.querySelectorAll('#kept a')[0].click()")
    # By words: a text may have come to its end at a space, which `innerText` leaves out.
    browser.until("document.querySelector('.answer.live .text')?.innerText.split(' ').includes('100')")
    browser.call("Page.reload")
    browser.until("document.readyState === 'complete' && document.querySelectorAll('.answer').length === 1")
    assert browser.js(ENDED) in ("stopped", "no end was sent") and "100" in browser.js(TEXT).split()
    wait(lambda: "disconnected" in mock.ended)

    # Back goes back, and a deleted one is gone: asked for once more, then for good.
    browser.click("#list")
    browser.js("document.querySelectorAll('#kept a')[1].click()")
    browser.until("document.querySelectorAll('.answer').length === 3")
    browser.js("history.back()")
    browser.until("document.querySelectorAll('.answer').length === 1")
    browser.js("document.querySelectorAll('#kept button')[1].click()")
    assert len(browser.js(titles)) == 2
    browser.js("document.querySelectorAll('#kept button')[1].click()")
    assert browser.js(titles) == ["forever"]
    browser.open(address)
    browser.until("document.querySelector('#model').options.length > 0")
    assert browser.js("document.querySelectorAll('.answer').length") == 0
    browser.click("#forget")
    browser.click("#forget")
    assert browser.js(titles) == [] and browser.js("Object.keys(localStorage).filter((k) => k.includes('chat.'))") == []
    assert browser.errors == []


def test_what_is_kept_is_bounded(browser, mock):
    """Old conversations make room; one that is too long is used and not kept; what is damaged is no conversation."""
    made = browser.js("""(() => {
        const make = (id, size) => { const c = newChat(); c.id = id; extend(c, -1, [{ role: 'user', content: 'x'.repeat(size) }]); return keep(c); };
        const many = [...Array(230).keys()].map((i) => make('a' + i, 10)).every(Boolean);
        const count = keptChats().length;
        const large = [...Array(9).keys()].map((i) => make('b' + i, 400000)).every(Boolean);
        const left = keptChats();
        return { many, count, large, newest: left.map((c) => c.id).includes('b8'), gone: !left.map((c) => c.id).includes('b0'),
                 size: left.reduce((n, c) => n + c.size, 0), tooLong: make('c', 3000000), after: keptChats().length === left.length };
    })()""")
    assert made.pop("size") <= 2_000_000 and made.pop("count") == 200
    assert made.pop("tooLong") is False and all(made.values()), made
    # Where the browser has less room than that, the oldest make room, too.
    assert browser.js("""(() => {
        localStorage.clear();
        localStorage.setItem('another', 'x'.repeat(4.6 * 1024 * 1024));
        const make = (id) => { const c = newChat(); c.id = id; extend(c, -1, [{ role: 'user', content: 'x'.repeat(200000) }]); return keep(c); };
        const all = ['a', 'b', 'c', 'd'].every(make);
        const ids = keptChats().map((c) => c.id);
        localStorage.clear();
        return all && ids.includes('d') && !ids.includes('a');
    })()""")
    browser.js("""localStorage.setItem('infernum.chat.bad', '5\\nBad\\n{"id":"bad","nodes":[{"up":0}],"at":0}');
        localStorage.setItem('infernum.chat.worse', 'nothing'); location.hash = '#bad'""")
    browser.until("location.hash === ''")
    browser.js("location.hash = '#worse'")
    browser.until("location.hash === ''")
    say(browser, "hello")
    assert answers(browser, 1) == "stop" and browser.errors == []


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
    wait(lambda: mock.ended)
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
    mock.shutdown()


def test_a_browser_may_log_in(browser, keyed):
    fresh(browser, keyed.url.replace("//", "//me:secret-1@"))
    browser.click("#toggle")
    browser.type("#max_tokens", "3")
    say(browser, "Hello")
    assert browser.until(ENDED) in ("stop", "length") and browser.errors == []


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
    # A telephone: nothing is wider than it, the header is one line, and what opens lies over the conversation.
    say(browser, "markdown")
    answers(browser, 1)
    browser.js("document.querySelector('#model').append(new Option('a-name/that-is-longer-than-any-telephone-is-wide-Instruct-GGUF'))")
    browser.js("document.querySelector('#model').selectedIndex = 2")
    for width in (320, 390):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=2, mobile=True)
        for show in ("list(false), settings(false)", "list(true)", "settings(true)"):
            browser.js(show)
            assert browser.js("document.documentElement.scrollWidth") == width, show
            parts = browser.js("[...document.querySelectorAll('header > *')].map((e) => e.getBoundingClientRect()).map((r) => [r.left, r.right, r.top, r.bottom])")
            assert all(0 <= left < right <= width and 0 <= top < bottom <= 50 for left, right, top, bottom in parts), parts
            assert all(a[1] <= b[0] for a, b in zip(parts, parts[1:])), "none lies over another"
        assert browser.js("document.querySelector('#chats').hidden"), "one at a time"
        wide = browser.js("[...document.querySelectorAll('#log *')].filter((e) => e.getBoundingClientRect().right > innerWidth && !e.closest('pre, .wide')).length")
        assert wide == 0
    browser.call("Emulation.clearDeviceMetricsOverride")


def test_the_page_is_what_the_server_gives(server):
    for path, name in {"/": "chat.html", "/docs": "docs.html"}.items():
        assert server.get(path)[2] == page(name)


def examples(browser, language):
    """The examples of the page of the API by operation."""
    return dict(browser.js(f"[...document.querySelectorAll('section')].map((s) => [s.id, s.querySelector('.{language} code').textContent])"))


# What is here for other kinds of models, for what does not exist yet, or not of JSON.
ELSEWHERE = {"create_embeddings", "create_ranking", "create_ranking_by_its_other_name", "create_scores", "load_lora_adapter",
             "unload_lora_adapter", "retrieve_response", "delete_response"}


def docs(browser, url):
    browser.errors.clear()
    browser.requests.clear()
    browser.open(url + "/docs")
    browser.until("document.querySelectorAll('section').length > 20")


def test_the_examples_of_the_api_work_as_they_stand(browser, server):
    docs(browser, server.url)
    order = browser.js("[...document.querySelectorAll('section')].map((s) => s.id)")
    assert order[0] == "create_chat_completion" and order[-1] == "is_sleeping", order
    described = [op["operationId"] for path in server.json("/openapi.json")["paths"].values() for op in path.values()]
    assert order == described, "one list, in one order"
    topics = browser.js("[...document.querySelectorAll('h2')].map((h) => h.textContent)")
    assert topics == ["OpenAI", "Anthropic", "Ollama", "Scores", "Tokens", "Pages", "Operation"]
    for name, text in examples(browser, "curl").items():
        if name not in ELSEWHERE:
            made = subprocess.run(["bash", "-c", f"{text} -sS -o /dev/null -w '%{{http_code}}'"], capture_output=True, text=True)
            assert made.stdout == "200" and not made.stderr, f"{name}: {made}\n{text}"
    scripts = {n: text for n, text in examples(browser, "python").items() if n not in ELSEWHERE}
    # One process for all: importing the packages takes longer than all requests.
    for name, text in scripts.items():
        try:
            exec(compile(text, name, "exec"), {"print": lambda answer: None})
        except Exception as error:
            raise AssertionError(f"{name}\n{text}") from error
    assert scripts["create_chat_completion"].startswith("from openai import OpenAI")
    assert scripts["create_message"].startswith("from anthropic import Anthropic")
    assert browser.errors == [] and all(url.startswith((server.url, "data:")) for url in browser.requests)


def test_the_examples_of_a_server_with_keys_bring_one(browser, keyed):
    docs(browser, keyed.url.replace("//", "//me:secret-1@"))
    found = examples(browser, "curl")
    assert "API_KEY" in found["create_chat_completion"] and "API_KEY" not in found["health"]
    env = {**os.environ, "API_KEY": "secret-2"}
    for name in ("create_chat_completion", "list_models", "list_tags", "health"):
        command = f"{found[name]} -sS -o /dev/null -w '%{{http_code}}'"
        assert subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True).stdout == "200", found[name]
        made = subprocess.run([sys.executable, "-c", examples(browser, "python")[name]], env=env, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr


def test_the_page_of_the_api_fits(browser, server):
    docs(browser, server.url)
    assert browser.js("getComputedStyle(document.querySelector('.python')).display") == "none"
    browser.click("[value=python]")
    assert browser.js("getComputedStyle(document.querySelector('.curl')).display") == "none"
    assert browser.js("getComputedStyle(document.querySelector('.python')).display") != "none"
    browser.js("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    for width in (320, 390, 1280):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 800)
        assert browser.js("document.documentElement.scrollWidth") <= width
    browser.js("document.querySelectorAll('details').forEach((d) => { d.open = false; })")
    for dark in (False, True):
        for width in (390, 1280):
            shot(browser, f"docs-{width}{'-dark' if dark else ''}", dark=dark, width=width)
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert browser.errors == []


def test_everything_has_a_name(browser, mock):
    unnamed = browser.js("""[...document.querySelectorAll('button, input, select, textarea')].filter((e) =>
        !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.id)""")
    assert unnamed == []
    assert browser.js("document.documentElement.lang") == "en"
    assert browser.js("document.querySelectorAll('[src]:not([src^=data]), link:not([href^=data])').length") == 0


def test_the_page_of_a_compilation_can_be_zoomed_on_a_phone(browser, tmp_path):
    file = tmp_path / "fusion.html"
    command = [BINARY, "compile", "--max-length", "128", "--target", "sm_90a", "--model", str(ROOT / "tests/fixtures/llama/f32"), "--html", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    browser.errors.clear()
    browser.open(file.as_uri())
    viewport = browser.js("document.querySelector('meta[name=viewport]').content")
    assert "scale=1" in viewport and "maximum" not in viewport and "user-scalable" not in viewport
    # What the details say is long, too.
    browser.js("document.querySelector('.node.grouped').dispatchEvent(new MouseEvent('click', { bubbles: true }))")
    for width in (320, 390, 1280):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 800)
        assert browser.js("document.documentElement.scrollWidth") <= width
        wide = browser.js("[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth && !e.closest('nav, .canvas')).map((e) => e.outerHTML.slice(0, 80))")
        assert wide == [], width
        for dark in (False, True):
            shot(browser, f"compile-{width}{'-dark' if dark else ''}", dark=dark, width=width)
    # Two fingers make all of it larger, as the browser does it; buttons make the graphs so, which then scroll by themselves.
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    browser.pinch(190, 500)
    browser.until("visualViewport.scale > 1.5")
    browser.call("Emulation.resetPageScaleFactor")
    size = "document.querySelector('#before svg').getBoundingClientRect().width"
    fitting = browser.js(size)
    for _ in range(3):
        browser.js("document.querySelector('[aria-label=Larger]').click()")
    assert abs(browser.js(size) / fitting - 1.5 ** 3) < 0.01
    assert browser.js("document.querySelector('#before').scrollWidth > 390 && document.documentElement.scrollWidth === 390")
    assert browser.js("document.querySelector('.lit') !== null"), "what was chosen stays so"
    shot(browser, "compile-larger", width=390)
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    browser.js("document.querySelector('[aria-label=\"As large as fits\"]').click()")
    assert browser.js(size) == fitting
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert browser.errors == []
