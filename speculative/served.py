"""An engine that serves a target with its draft while something is measured, and sessions played on it."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from numpy.typing import NDArray

from model.encoding import END_OF_MESSAGE
from model.profile import load_profile
from model.tokenizer import K3Tokenizer
from model.training.documents import Encoder
from speculative.draft import DraftError
from speculative.players import Player, Request

_START_TIMEOUT_S: Final = 400.0
_REQUEST_TIMEOUT_S: Final = 600.0
_MOST_TOKENS: Final = 400


@dataclass(frozen=True, slots=True)
class Answer:
    """Ids that an engine wrote, and how often it verified a block for them."""

    ids: list[int]
    rounds: int


class Engine:
    """A running engine."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=_REQUEST_TIMEOUT_S)

    def is_ready(self) -> bool:
        """Does it answer."""
        with suppress(httpx.HTTPError):
            return self._client.get("/health", timeout=5).is_success
        return False

    def generate(self, ids: Sequence[int], **sampling: Any) -> Answer:
        """Continue ids. Raises `DraftError` when the engine refuses."""
        body = {"input_ids": list(ids), "sampling_params": sampling}
        response = self._client.post("/generate", json=body)
        if not response.is_success:
            raise DraftError(f"the engine answered {response.status_code}: {response.text[:300]}")
        answer: dict[str, Any] = response.json()
        return Answer(answer["output_ids"], int(answer["meta_info"].get("spec_verify_ct") or 0))


@contextmanager
def running(model: Path, draft: Path | None, profile: str = "cpu-tiny") -> Generator[Engine]:
    """Boot an engine, and end it with all its processes. Raises `DraftError` with the end of its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = load_profile(profile).command(model, port, store_url=None, draft=draft, extra=())
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command.argv,
            env=command.environment(os.environ),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            engine = Engine(f"http://127.0.0.1:{port}")
            end = time.monotonic() + _START_TIMEOUT_S
            while not engine.is_ready():
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    tail = "\n".join(log.read().splitlines()[-15:])
                    raise DraftError(f"the engine did not start; the end of its log:\n{tail}")
                time.sleep(0.5)
            yield engine
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True, slots=True)
class Played:
    """A session that an engine played: `ids` [L], `written` [L] bool which of them it wrote, and what its
    blocks gained: `drafted` tokens behind the first of each message, in `rounds`."""

    ids: NDArray[np.int16]
    written: NDArray[np.bool_]
    drafted: int
    rounds: int

    @property
    def messages(self) -> list[tuple[int, int]]:
        """Start and end of each message."""
        edges = np.flatnonzero(np.diff(self.written.astype(np.int8), prepend=0, append=0))
        return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def play(engine: Engine, tokenizer: K3Tokenizer, request: Request, messages: int, longest: int) -> Played:
    """Let an engine write the messages of a session greedily, up to `messages` or `longest` tokens in all."""
    player = Player(request, tokenizer, Encoder(tokenizer))
    ids = list(player.prompt)
    written = [False] * len(ids)
    drafted = rounds = 0
    for _ in range(messages):
        if len(ids) + _MOST_TOKENS > longest:
            break
        answer = engine.generate(
            ids, temperature=0, max_new_tokens=_MOST_TOKENS, stop_token_ids=sorted(tokenizer.eos_ids)
        )
        drafted += len(answer.ids) - 1
        rounds += answer.rounds
        ids += answer.ids
        written += [True] * len(answer.ids)
        if answer.ids[-1] not in tokenizer.eos_ids:
            ids.append(tokenizer.markup[END_OF_MESSAGE])
            written.append(False)
        follows = player.answer(answer.ids)
        ids += follows
        written += [False] * len(follows)
    return Played(np.array(ids, np.int16), np.array(written), drafted, rounds)
