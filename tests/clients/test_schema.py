"""Requests made from the OpenAPI document, valid and not: none may make the server fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Server, engine_apart


def with_model(document, model):
    """The document, where every field `model` of a request says which one there is."""
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"type": "string", "enum": [model]}
        for part in schema.get("allOf", []):
            if "model" in part.get("properties", {}):
                part["properties"]["model"] = {"type": "string", "enum": [model]}
    return document


# Short sequences, so that no request is long, and no queue to be full.
SHORT, QUEUE = ["--max-length", "96"], ["--queue", "4096"]


def fuzz(folder, examples, seconds, flags=(*SHORT, *QUEUE)):
    with Server(*flags) as server:
        file = folder / "openapi.json"
        file.write_text(json.dumps(with_model(server.json("/openapi.json"), server.model)))
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", str(file), "--url", server.url]
        command += ["--mode", "all", "--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing"]
        # One worker: what parses Python's own texts in Python 3.11 counts wrong in two threads at once, and fails.
        command += ["--max-examples", str(examples), "--workers", "1", "--seed", "1", "--request-timeout", "30"]
        # A server that sleeps answers all others with 503, as it should.
        command += ["--exclude-path", "/sleep"]
        command += ["--no-color", "--suppress-health-check", "all"]
        log = folder / "log"
        with log.open("w") as out:
            code = subprocess.run(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, timeout=seconds, cwd=folder).returncode
        print(log.read_text())
        assert code == 0
        asked = server.metric("request_success_total")
        assert asked > 20, f"only {asked:.0f} requests were answered by the model: the valid half is not valid"
        server.until_idle()


@pytest.mark.timeout(430)
def test_no_request_makes_it_fail(tmp_path):
    fuzz(tmp_path, 50, 400)


@pytest.mark.timeout(430)
def test_no_request_makes_a_front_end_fail(tmp_path):
    with engine_apart(*SHORT, *QUEUE) as flags:
        fuzz(tmp_path, 10, 400, [*flags, *QUEUE])


@pytest.mark.heavy
@pytest.mark.timeout(4000)
def test_no_request_makes_it_fail_for_long(tmp_path):
    fuzz(tmp_path, 1000, 3600)


@pytest.mark.heavy
@pytest.mark.timeout(4000)
def test_no_request_makes_a_front_end_fail_for_long(tmp_path):
    with engine_apart(*SHORT, *QUEUE) as flags:
        fuzz(tmp_path, 1000, 3600, [*flags, *QUEUE])
