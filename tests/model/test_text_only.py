"""Serving text alone, checked in a process of its own: it changes SGLang for good."""

import os
import subprocess
import sys

import pytest

PARSE = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
print(prepare_server_args(["--model-path", "."]).enable_multimodal)
"""
CHANGED = """
import model.text_only
model.text_only._EXPECTED = "(args, more)"
"""


def parse(program: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "SGLANG_PLATFORM"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.engine
def test_media_are_off_only_when_asked_for() -> None:
    assert parse(PARSE).stdout.split()[-1] == "None"
    assert parse(PARSE, LONGHAUL_TEXT_ONLY="1").stdout.split()[-1] == "False"
    refused = parse(CHANGED + PARSE, LONGHAUL_TEXT_ONLY="1")
    assert refused.returncode == 3
    assert "longhaul: ServerArgs.from_cli_args takes" in refused.stderr
