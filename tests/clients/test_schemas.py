"""Texts under random schemas, at a temperature that makes nearly every token as likely as another: what ends is valid.

Two validators that know nothing of each other judge, one of them in Rust. Many of them, and with figures:

    INFERNUM_GENERATIONS=10000 INFERNUM_REPORT=report.json tests/clients/run.sh test_schemas.py -s
"""

import collections
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, InvalidOperation

import jsonschema
import jsonschema_rs
import pytest
import regress
from conftest import Server
from schemas import random_schema

GENERATIONS = int(os.environ.get("INFERNUM_GENERATIONS", 240))
FIRST = int(os.environ.get("INFERNUM_FIRST_SEED", 0))
AT_ONCE = 16
TOKENS = 300
# How a server may say that it does not know a keyword, or that nothing fulfils a schema.
REASONS = re.compile(r"Unimplemented keys|Unsatisfiable schema|Unknown format|oneOf|sibling keys|only supported when|not supported|look-?around|"
                     r"[Pp]attern properties|Failed to resolve|retrieve|minProperties|a double is exactly|are not disjoint|Unable to determine")


def pattern(_, expression, instance, __):
    """As JavaScript reads expressions, which the standard asks for."""
    if isinstance(instance, str) and not regress.Regex(expression, "u").find(instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {expression!r}")


def pattern_properties(validator, schemas, instance, _):
    for expression, schema in schemas.items():
        for name, value in instance.items() if isinstance(instance, dict) else ():
            if regress.Regex(expression, "u").find(name):
                yield from validator.descend(value, schema, path=name, schema_path=expression)


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern, "patternProperties": pattern_properties})


def never(name):
    raise ValueError(f"{name} is no JSON")


def exactly(text):
    """A number as it is written: binary ones are multiples of nothing. An exponent may be of any size; beyond those that decimals have,
    it is the largest that they have."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal(re.sub(r"(?<=[eE])([+-]?)\d+$", r"\g<1>999999", text))


def fault(schema, text):
    """What is wrong with a text; nothing where it is valid."""
    try:
        value = json.loads(text, parse_constant=never, parse_float=exactly)
    except ValueError as error:
        return f"it is no JSON: {error}"
    same = json.loads(json.dumps(schema), parse_float=Decimal)
    found = next(Validator(same, format_checker=Validator.FORMAT_CHECKER).iter_errors(value), None)
    if found:
        return f"jsonschema: {found.message} at {list(found.absolute_schema_path)}"
    found = next(jsonschema_rs.Draft202012Validator(schema, validate_formats=True).iter_errors(value), None)
    return f"jsonschema_rs: {found.message} at {list(found.schema_path)}" if found else None


def body(seed, schema):
    """The same question in the ways that it can be asked."""
    given = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}}
    ways = [given, {"guided_json": schema}, {"structured_outputs": {"json": schema}}]
    fields = {"temperature": 2, "seed": seed, "max_tokens": TOKENS, **ways[seed % len(ways)]}
    if seed % 2:
        return "/v1/completions", {"prompt": "Once upon a time", **fields}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me."}], **fields}


class Tally:
    def __init__(self, server):
        self.server, self.count = server, collections.Counter()
        self.faults, self.unknown, self.refusals = [], [], collections.Counter()

    def ask(self, seed):
        schema = random_schema(seed)
        path, request = body(seed, schema)
        status, _, text = self.server.get(path, request)
        if status == 400:
            message = json.loads(text)["error"]["message"]
            reason = REASONS.search(message)
            self.refusals[reason[0] if reason else "?"] += 1
            if not reason:
                self.unknown.append((seed, schema, message))
            return
        if status != 200:
            self.faults.append((seed, schema, f"{status}: {text}"))
            return
        choice = json.loads(text)["choices"][0]
        said = choice["text"] if "text" in choice else choice["message"]["content"]
        self.count[choice["finish_reason"]] += 1
        if choice["finish_reason"] == "stop":
            if wrong := fault(schema, said):
                self.faults.append((seed, schema, f"{wrong}: {said!r}"))
        elif choice["finish_reason"] != "length":
            self.faults.append((seed, schema, f"it ended with {choice['finish_reason']!r}"))

    def generated(self):
        return sum(self.count.values())


def masks(server):
    """What masks took, and how many of the rows that needed one waited for it."""
    text = server.get("/metrics")[2]
    buckets = re.findall(r'^infernum:mask_seconds_bucket{.*le="(.*)"} (\d+)$', text, re.M)
    bounds, counts = [float(bound) for bound, _ in buckets], [int(count) for _, count in buckets]
    picked, waited = server.metric("constrained_tokens_total"), server.metric("mask_waits_total")
    return {"masks": counts[-1], "mask_microseconds": {name: round(1e6 * within(bounds, counts, part), 1) for name, part in [("p50", 0.5), ("p99", 0.99)]},
            "tokens_picked": picked, "tokens_forced": server.metric("forced_tokens_total"), "rows_left_out": waited,
            "share_left_out": round(waited / (picked + waited), 6)}


def within(bounds, counts, part):
    """Where a part of what was counted lies, as Prometheus has it: evenly spread in its bucket."""
    rank, low, before = part * counts[-1], 0.0, 0
    for bound, count in zip(bounds, counts):
        if count >= rank and count > before:
            return low + (bound - low) * (rank - before) / (count - before) if bound != float("inf") else low
        low, before = bound, count
    return low


@pytest.mark.timeout(3600)
def test_what_ends_is_valid():
    with Server("--queue", "4096") as server:
        tally, seed, start = Tally(server), FIRST, time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while tally.generated() < GENERATIONS:
                todo = min(512, max(AT_ONCE, GENERATIONS - tally.generated()))
                list(pool.map(tally.ask, range(seed, seed + todo)))
                seed += todo
        took = time.monotonic() - start
        server.until_idle()
        report = {"schemas": seed - FIRST, "generations": tally.generated(), "ended": tally.count, "faults": len(tally.faults),
                  "refused": tally.refusals, "seconds": round(took, 1), **masks(server)}
        print(json.dumps(report, indent=1))
        if path := os.environ.get("INFERNUM_REPORT"):
            with open(path, "w") as file:
                json.dump(report, file, indent=1)
        for seed, schema, wrong in (tally.faults + tally.unknown)[:40]:
            print(f"\nseed {seed}: {json.dumps(schema, ensure_ascii=False)}\n  {wrong}")
        assert not tally.faults
        assert not tally.unknown, "refused for no reason that is known"
        assert tally.count["stop"] > tally.generated() / 2, "most were cut, which shows nothing"
