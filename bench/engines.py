"""Engines for measurements: booted with a launch profile, asked over HTTP, ended with all they started."""

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from model.profile import load_profile
from service.processes import HttpService
from service.stack import CPU_START_TIMEOUT_S, ENGINE_HOST, engine_service

_POLL_S = 0.5
_REQUEST_TIMEOUT_S = 600.0


class EngineFailure(RuntimeError):
    """An engine that doesn't boot or doesn't answer; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What `/generate` answered: new ids and what the engine says about the request."""

    ids: list[int]
    meta: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return int(self.meta["cached_tokens"])

    @property
    def tiers(self) -> dict[str, int]:
        """Cached tokens by where they lay: `device`, `host`, `storage`."""
        details: dict[str, Any] = self.meta.get("cached_tokens_details") or {"device": self.cached_tokens}
        return {name: int(details.get(name, 0)) for name in ("device", "host", "storage")}


class Engine:
    """A running engine."""

    def __init__(self, service: HttpService, port: int) -> None:
        self._service = service
        self.url = f"http://{ENGINE_HOST}:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=_REQUEST_TIMEOUT_S)

    def generate(self, ids: Sequence[int], tokens: int, **sampling: Any) -> Answer:
        """Continue `ids` greedily by exactly `tokens` tokens; raises `EngineFailure`."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling},
        }
        answer = self.ask(body)
        return Answer(answer["output_ids"], answer["meta_info"])

    def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What `/generate` answers; raises `EngineFailure`."""
        response = self.client.post("/generate", json=body)
        if not response.is_success:
            raise EngineFailure(f"/generate answered {response.status_code}: {response.text[:500]}")
        return response.json()

    def stream(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """The events that `/generate` answers, as they come; raises `EngineFailure`."""
        with self.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
            if not response.is_success:
                text = response.read().decode(errors="replace")
                raise EngineFailure(f"/generate answered {response.status_code}: {text[:500]}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "output_ids" not in event:
                        raise EngineFailure(f"/generate answered {line[:500]}")
                    yield event

    def flush(self) -> None:
        """Empty the caches of the engine's process."""
        self.client.post("/flush_cache").raise_for_status()

    def kill(self) -> None:
        """End the engine as `kill -9` does, with no time to write anything."""
        assert self._service.pid is not None, "the engine was stopped"
        os.killpg(self._service.pid, signal.SIGKILL)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((ENGINE_HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_engine(
    model: Path,
    log: Path,
    *,
    profile: str = "cpu-tiny",
    store_url: str | None = None,
    draft: Path | None = None,
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Generator[Engine]:
    """Boot an engine on a free port, and end it with all its processes. Raises `EngineFailure`.

    One without a store has nothing to lose and is killed: SGLang takes ten seconds to leave when asked to.
    """
    with running_engines(
        model, [log], profile=profile, store_url=store_url, draft=draft, extra=extra, env=env
    ) as engines:
        yield engines[0]


@contextmanager
def running_engines(
    model: Path,
    logs: Sequence[Path],
    *,
    profile: str = "cpu-tiny",
    store_url: str | None = None,
    draft: Path | None = None,
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Generator[list[Engine]]:
    """As `running_engine`, for one engine a log; they boot at once. `env` goes before the profile's."""
    engines: list[Engine] = []
    services: list[HttpService] = []
    try:
        for log in logs:
            port = free_port()
            command = load_profile(profile).command(
                model, port, store_url=store_url, draft=draft, extra=extra
            )
            command = replace(command, env={**command.env, **(env or {})})
            service = engine_service(command, port, log)
            service.launch()
            services.append(service)
            engines.append(Engine(service, port))
        end = time.monotonic() + CPU_START_TIMEOUT_S
        for service in services:
            while not service.is_ready():
                if service.poll() is not None or time.monotonic() > end:
                    tail = "\n".join(service.log.read_text(errors="replace").splitlines()[-15:])
                    raise EngineFailure(f"the engine did not start; the end of {service.log}:\n{tail}")
                time.sleep(_POLL_S)
        yield engines
    finally:
        for service in services:
            if store_url is None and service.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(service.pid, signal.SIGKILL)
            service.stop()


@dataclass(frozen=True, slots=True)
class Way:
    """How one of several engines is booted: with a draft or without, and with what further arguments."""

    draft: Path | None = None
    extra: tuple[str, ...] = ()


def boot_each(
    model: Path, profile: str, ways: Mapping[str, Way], logs: Path, *, at_once: bool
) -> Generator[tuple[str, Engine]]:
    """One engine a way, its log under `logs`: one after another, or all at once and one after another given.

    Raises `EngineFailure` for the way whose turn it is.
    """

    def start(name: str) -> AbstractContextManager[Engine]:
        way, log = ways[name], logs / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.log"
        return running_engine(model, log, profile=profile, draft=way.draft, extra=way.extra)

    if not at_once:
        for name in ways:
            with start(name) as engine:
                yield name, engine
        return
    with ExitStack() as stack, ThreadPoolExecutor(len(ways)) as pool:
        pending = {name: pool.submit(stack.enter_context, start(name)) for name in ways}
        wait(pending.values())  # one that still boots would disturb what is measured
        for name, future in pending.items():
            yield name, future.result()


def note(text: str) -> None:
    """Say on stderr what is being done."""
    print(text, file=sys.stderr, flush=True)
