"""Requests made from the OpenAPI document, valid and not: none may make the server fail."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Server


def fuzz(examples, seconds):
    # Short sequences, so that no request is long, and no queue to be full.
    with Server("--max-length", "96", "--queue", "4096") as server:
        tool = str(Path(sys.executable).parent / "schemathesis")
        command = [tool, "run", f"{server.url}/openapi.json", "--mode", "all", "--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing",
                   "--max-examples", str(examples), "--workers", "2", "--seed", "1", "--request-timeout", "30", "--no-color", "--suppress-health-check", "all"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        print(result.stdout[-6000:], result.stderr[-2000:])
        assert result.returncode == 0
        server.until_idle()


@pytest.mark.timeout(260)
def test_no_request_makes_it_fail():
    fuzz(25, 240)


@pytest.mark.heavy
@pytest.mark.timeout(4000)
def test_no_request_makes_it_fail_for_long():
    fuzz(500, 3600)
