"""The real engine over the store: what it restores, and what it does without."""

import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import redis

from bench.engines import Answer, Engine, running_engine
from cache_store.roots import Root, root_key, root_page
from cache_store.servers import RedisServer, Role

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

PAGE = 64
ANSWER = 16
NEAR_TIE = 1e-3
TIMEOUT_S = 2.0  # of the profile


@pytest.fixture(scope="module")
def model() -> Path:
    from model import tiny

    return tiny.build(tiny.default_path()).path.absolute()


class Conversation:
    """Turns of random ids, each answer compared with the reference."""

    def __init__(self, model: Path) -> None:
        from model.reference import ReferenceModel

        self._reference = ReferenceModel.load(model)
        self._random = random.Random(7)
        self.ids: list[int] = []

    def add(self, tokens: int) -> None:
        self.ids += [self._random.randrange(200) for _ in range(tokens)]

    def ask(self, engine: Engine) -> Answer:
        answer = engine.generate(self.ids, ANSWER)
        self.check(answer.ids)
        return answer

    def check(self, answer: Sequence[int]) -> None:
        steps = self._reference.greedy(self.ids, ANSWER)
        assert len(answer) == len(steps)
        parting = next((s for token, s in zip(answer, steps, strict=True) if token != s.token), None)
        assert parting is None or parting.gap < NEAR_TIE, (
            f"wrong output, the reference is sure by {parting.gap}"
        )


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(Role.BLOBS, tmp_path / "blobs", max_memory_bytes=1 << 30) as server:
        yield server


def settle(client: redis.Redis) -> None:
    """Wait until the engine writes no more."""
    size, since, until = -1, time.monotonic(), time.monotonic() + 120
    while size <= 0 or time.monotonic() - since < 2:
        assert time.monotonic() < until, f"the store holds {size} keys and changes"
        if (found := client.dbsize()) != size:
            size, since = found, time.monotonic()
        time.sleep(0.1)


def flush(engine: Engine) -> None:
    """Empty the engine's caches, once it has nothing more to write to the store."""
    until = time.monotonic() + 60
    while not engine.client.post("/flush_cache").is_success:
        assert time.monotonic() < until, "the engine does not come to rest"
        time.sleep(0.2)


def series(engine: Engine, name: str) -> float:
    """Sum of a series in the engine's metrics."""
    text = httpx.get(f"{engine.url}/metrics", timeout=60).text
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def play(talk: Conversation, engine: Engine) -> None:
    for added in (500, 70, 130):
        talk.add(added)
        talk.ids += talk.ask(engine).ids


def restore(talk: Conversation, engine: Engine) -> None:
    """One more turn, nearly all of whose known tokens come from storage."""
    known = len(talk.ids) - ANSWER
    talk.add(60)
    assert talk.ask(engine).tiers["storage"] >= known // PAGE * PAGE - 2 * PAGE


def pools(client: redis.Redis) -> set[bytes]:
    found = {key.split(b":")[2] for key in client.scan_iter() if not key.startswith(b"lh1:root:")}
    assert found >= {b"held", b"next"}, "SGLang does not say which pages come before others"
    return found - {b"held", b"next"}


def test_a_session_with_a_draft_survives_its_engine(model: Path, blobs: RedisServer, tmp_path: Path):
    """The draft's pool travels as well."""
    from speculative import draft

    client, talk = redis.Redis(unix_socket_path=str(blobs.socket)), Conversation(model)
    draft.build(tmp_path / "draft", model)
    options = {"store_url": blobs.url, "draft": tmp_path / "draft"}
    with running_engine(model, tmp_path / "first.log", **options) as first:
        play(talk, first)
        settle(client)
        first.kill()
    assert pools(client) == {b"kv", b"mamba", b"draft"}
    with running_engine(model, tmp_path / "second.log", **options) as second:
        restore(talk, second)
        read = re.search(
            r'longhaul_store_pages_total{direction="read",outcome="ok",pool="draft"} (\S+)',
            httpx.get(f"{second.url}/metrics", timeout=60).text,
        )
        assert read is not None and float(read[1]) > 0


def test_a_session_survives_its_engine_and_its_store(model: Path, blobs: RedisServer, tmp_path: Path):
    client, talk = redis.Redis(unix_socket_path=str(blobs.socket)), Conversation(model)
    # As the gateway does before a request.
    talk.add(500)
    page = root_page(talk.ids, None, PAGE)
    assert page is not None
    client.set(root_key(page), Root("acme", "1h").encode())
    with running_engine(model, tmp_path / "first.log", store_url=blobs.url) as first:
        play(talk, first)
        settle(client)
        # The last two states of the chain stay, those before them expire soon.
        lives = sorted(client.pttl(key) for key in client.scan_iter(match="*:mamba:*"))
        assert len(lives) > 2 and lives[-3] <= 60_000 < 3_500_000 < lives[-2] <= lives[-1] < 5_000_000
        assert len(list(client.scan_iter(match="*:held:*:acme"))) == 2
        assert series(first, "longhaul_store_states_total") == len(lives) - 2
        first.kill()
    assert pools(client) == {b"kv", b"mamba"}
    with running_engine(model, tmp_path / "second.log", store_url=blobs.url) as second:
        restore(talk, second)
        # What the scheduler's process counts is in the page that the HTTP server's process serves.
        assert series(second, "longhaul_store_lookups_total") >= 1
        assert series(second, "longhaul_store_bytes_total") > 0
        assert series(second, "longhaul_store_breaker") == 0
        settle(client)

        # Spoilt states: nothing from storage, and the same answer.
        for key in client.scan_iter(match="*:mamba:*"):
            client.setrange(key, 80, bytes(client.strlen(key) - 80))
        flush(second)
        assert talk.ask(second).tiers["storage"] == 0
        assert series(second, "longhaul_store_errors_total") >= 1

        # A store that does not answer: the same answer, after the deadline at the latest.
        settle(client)
        flush(second)
        started = time.monotonic()
        talk.ask(second)
        usual_s = time.monotonic() - started
        flush(second)
        stopped = client.info("server")["process_id"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            for _ in range(3):
                started = time.monotonic()
                answer = talk.ask(second)
                assert time.monotonic() - started < usual_s + 2 * TIMEOUT_S + 5
                assert answer.tiers["storage"] == 0
                flush(second)
            assert series(second, "longhaul_store_errors_total") >= 2
        finally:
            os.kill(stopped, signal.SIGCONT)

        # A store that is gone.
        blobs.stop()
        flush(second)
        assert talk.ask(second).tiers["storage"] == 0
