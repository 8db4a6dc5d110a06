"""The checks of `longhaul doctor` that boot the real engine: answer, cache, restart and restore."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis

from cache_store.servers import RedisServer, Role, ServerError
from model.hardware import CPU_PROFILE
from model.profile import load_profile
from model.state import state_directory
from model.tokenizer import K3Tokenizer
from service.diagnosis import Check, CheckFailed
from service.stack import CPU_START_TIMEOUT_S, ENGINE_HOST, engine_service
from service.supervisor import Supervised, SupervisionError, Supervisor

PAGE_TOKENS = 64
OUTPUT_TOKENS = 16
# Two logits this close may swap places between two orders of the same sum in float32.
NEAR_TIE = 1e-3
# States are kept at the ends of prompts and turns: up to two pages before the end of what was seen.
RESTORE_SLACK_TOKENS = 2 * PAGE_TOKENS
_BLOB_BYTES = 256 << 20
_REQUEST_TIMEOUT_S = 300.0
_SETTLE_LIMIT_S = 60.0
_SENTENCE = "The quick brown fox jumps over the lazy dog near the river bank. "


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine answered: the ids, and how many tokens of the prompt came from a cache."""

    ids: list[int]
    cached_tokens: int


class EngineTrial:
    """One conversation of three turns with an engine of its own that is killed before the third."""

    def __init__(self, folder: Path, supervisor: Supervisor) -> None:
        self._folder = folder
        self._supervisor = supervisor
        self._blobs = RedisServer(Role.BLOBS, folder / "blobs", max_memory_bytes=_BLOB_BYTES)
        self._model = state_directory() / "models" / "k3-tiny"
        self._port = _free_port()
        self._entry: Supervised | None = None
        self._history: list[int] = []
        self._boots = 0

    def checks(self) -> list[Check]:
        """The checks in order."""
        return [
            Check("tiny model", self._build, needs=("packages",)),
            Check("engine boot", self._boot_first, needs=("tiny model", "hooks", "redis")),
            Check("greedy answer", self._answer, needs=("engine boot",)),
            Check("cached turn", self._continue, needs=("greedy answer",)),
            Check("restart and restore", self._restore, needs=("cached turn",)),
        ]

    def _build(self) -> str:
        if (self._model / "config.json").is_file():
            return f"{self._model}"
        self._model = self._folder / "k3-tiny"
        command = [
            sys.executable,
            "-m",
            "service.cli",
            "model",
            "build",
            "--output",
            str(self._model),
            "--json",
        ]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            last = (built.stderr.strip().splitlines() or ["no message"])[-1]
            raise CheckFailed(last, "run `make setup`, and look for a full disk")
        parameters = json.loads(built.stdout.splitlines()[-1])["parameters"]
        return f"built, {parameters:,} parameters"

    def _boot_first(self) -> str:
        try:
            self._supervisor.start(Supervised(self._blobs, 60))
        except (SupervisionError, ServerError) as error:
            raise CheckFailed(str(error), "see the check 'redis'") from error
        return self._boot()

    def _boot(self) -> str:
        self._boots += 1
        command = load_profile(CPU_PROFILE).command(self._model, self._port, store_url=self._blobs.url)
        log = self._folder / f"engine-{self._boots}.log"
        entry = Supervised(engine_service(command, self._port, log), CPU_START_TIMEOUT_S)
        self._entry = entry
        start = time.monotonic()
        try:
            self._supervisor.start(entry)
        except SupervisionError as error:
            raise CheckFailed(
                str(error),
                "free memory (4 GiB) or run `make setup`; the lines above say what the engine missed",
            ) from error
        return f"ready in {time.monotonic() - start:.1f} s on port {self._port}"

    def _answer(self) -> str:
        prompt = K3Tokenizer.load(self._model).encode_text(_SENTENCE * 24)
        answer = self._generate(prompt)
        note = self._compare(prompt, answer)
        self._history = [*prompt, *answer.ids]
        return f"{OUTPUT_TOKENS} tokens after {len(prompt)} equal the reference{note}"

    def _continue(self) -> str:
        return self._turn("the prefix cache", "look for 'radix' and 'mamba' in the engine's log")

    def _restore(self) -> str:
        self._await_backup()
        entry = self._entry
        assert entry is not None and entry.service.pid is not None
        os.kill(entry.service.pid, signal.SIGKILL)
        self._supervisor.finish(entry)
        boot = self._boot()
        restored = self._turn("storage", "look for 'RedisStore' and 'hicache' in the engine's log")
        return f"killed, {boot.split(' on ')[0]}, {restored}"

    def _turn(self, source: str, where: str) -> str:
        """One more turn of the conversation: most of its prompt has to come from `source`."""
        before = len(self._history)
        prompt = [*self._history, *K3Tokenizer.load(self._model).encode_text(_SENTENCE * 2)]
        answer = self._generate(prompt)
        note = self._compare(prompt, answer)
        least = max(PAGE_TOKENS, before // PAGE_TOKENS * PAGE_TOKENS - RESTORE_SLACK_TOKENS)
        if answer.cached_tokens < least:
            raise CheckFailed(
                f"{answer.cached_tokens} of {before} known tokens came from {source}, not {least} or more",
                f"{where}: {self._kept_log()}",
            )
        self._history = [*prompt, *answer.ids]
        return f"{answer.cached_tokens} of {before} known tokens from {source}, answer equal{note}"

    def _generate(self, ids: list[int]) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling}
        url = f"http://{ENGINE_HOST}:{self._port}/generate"
        try:
            response = httpx.post(url, json=body, timeout=_REQUEST_TIMEOUT_S)
            response.raise_for_status()
            found: dict[str, Any] = response.json()
            return Answer(list(found["output_ids"]), int(found["meta_info"]["cached_tokens"]))
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise CheckFailed(
                f"POST /generate: {type(error).__name__}: {error}",
                f"read the engine's log: {self._kept_log()}",
            ) from error

    def _compare(self, prompt: list[int], answer: Answer) -> str:
        """Compare with the reference; returns a note about a near-tie, and raises `CheckFailed`."""
        command = [
            sys.executable,
            "-m",
            "model.reference",
            "--model",
            str(self._model),
            "--ids",
            "-",
            "--json",
        ]
        run = subprocess.run(
            [*command, "--tokens", str(OUTPUT_TOKENS)],
            input=json.dumps(prompt),
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            last = (run.stderr.strip().splitlines() or ["no message"])[-1]
            raise CheckFailed(f"the reference fails: {last}", "run `make setup`")
        reference = json.loads(run.stdout.splitlines()[-1])
        tokens: list[int] = reference["tokens"]
        differ = [i for i, (a, b) in enumerate(zip(answer.ids, tokens, strict=False)) if a != b]
        if len(answer.ids) != len(tokens):
            raise CheckFailed(
                f"{len(answer.ids)} tokens where the reference has {len(tokens)}",
                f"read the engine's log: {self._kept_log()}",
            )
        if not differ:
            return ""
        first = differ[0]
        gap = float(reference["gaps"][first])
        if gap >= NEAR_TIE:
            raise CheckFailed(
                f"token {first} is {answer.ids[first]}, the reference says {tokens[first]} (by {gap:.4f})",
                "run `make test`: the operator tests say which part computes wrongly on this machine",
            )
        return f" up to a near-tie at token {first} (gap {gap:.1e})"

    def _await_backup(self) -> None:
        """Wait until the engine writes no more to the store."""
        client = redis.Redis(unix_socket_path=str(self._blobs.socket), socket_timeout=10)
        end = time.monotonic() + _SETTLE_LIMIT_S
        size, since = -1, time.monotonic()
        while time.monotonic() < end:
            found = int(client.dbsize())
            if found != size:
                size, since = found, time.monotonic()
            elif found > 0 and time.monotonic() - since > 2:
                return
            time.sleep(0.1)
        raise CheckFailed(
            f"the store holds {size} keys after {_SETTLE_LIMIT_S:.0f} s",
            f"read the engine's log: {self._kept_log()}",
        )

    def _kept_log(self) -> Path:
        """The engine's log, copied to where it outlives the trial."""
        kept = state_directory() / "logs" / "doctor-engine.log"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes((self._folder / f"engine-{self._boots}.log").read_bytes())
        return kept


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ENGINE_HOST, 0))
        return int(probe.getsockname()[1])
