"""What the images are made of, the probe in them, and the script that builds them."""

import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROBE = ROOT / "deploy" / "probe.py"


def test_every_package_is_in_the_build_context_and_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    copied = re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE)
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert packages == set(copied)
    assert packages <= set(allowed)
    assert project["project"]["readme"] in allowed


def test_the_engine_image_is_of_the_locked_sglang() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (locked,) = [package["version"] for package in lock["package"] if package["name"] == "sglang"]
    assert re.search(r"^ARG SGLANG_IMAGE=\S+:v([\w.]+)$", DOCKERFILE, re.MULTILINE)[1] == locked


def stage(name: str) -> str:
    return re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize(("name", "port"), [("gateway", 8000), ("cpu", 8000), ("engine", 30000)])
def test_an_image_says_how_it_is_watched(name: str, port: int) -> None:
    assert re.search(rf"^EXPOSE .*\b{port}\b", stage(name), re.MULTILINE)
    assert f'CMD ["probe", "http://127.0.0.1:{port}/health"]' in stage(name)
    # Exec form: the signal that stops a container reaches the program and not a shell.
    assert re.search(r'^ENTRYPOINT \[.*"longhaul"\]$', stage(name), re.MULTILINE)


@pytest.mark.parametrize("name", ["gateway", "cpu"])
def test_an_image_does_not_run_as_root(name: str) -> None:
    assert re.findall(r"^USER (\S+)$", stage(name), re.MULTILINE) == ["10001:10001"]


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server on a port of this machine that answers every GET with a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def probe(port: int) -> int:
    # A proxy in the environment must not be asked for the container's own endpoint.
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    return subprocess.run(
        [sys.executable, PROBE, f"http://127.0.0.1:{port}/health"], check=False, env=environment, timeout=30
    ).returncode


def test_the_probe_tells_a_good_answer_from_a_bad_one_and_from_none() -> None:
    with answering(200) as port:
        assert probe(port) == 0
    assert probe(port) == 1
    with answering(503) as port:
        assert probe(port) == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["nonsense"], {}, "no target named 'nonsense'; there are: gateway, cpu, engine"),
        (["gateway"], {"BUILDER": "make"}, "BUILDER must be docker or buildah, not 'make'"),
        (["gateway"], {"BUILDER": "docker", "CA_BUNDLE": "/nowhere"}, "CA_BUNDLE: /nowhere can't be read"),
    ],
)
def test_the_build_script_says_what_is_wrong(
    arguments: list[str], environment: dict[str, str], words: str
) -> None:
    done = subprocess.run(
        [ROOT / "deploy" / "build-image.sh", *arguments],
        check=False,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert words in done.stderr
