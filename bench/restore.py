"""How soon a long session answers after its engine was restarted: from Redis, and from SGLang's file backend.

A first engine computes a turn, once over Redis and once over files, and is killed. A second one, which has
never computed it, is asked the next turn, a little longer, over the unix socket, over TCP and with files, in
turns and with empty caches each time: the backends are changed while it runs, so that nothing else differs
between them. Times are medians, from sending the request to its first token. Exit status 1 unless each time
the whole former turn came from storage and the answer was the first engine's.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from bench.engines import Engine, EngineFailure, note, running_engine
from bench.store import server
from model import tiny
from model.profile import load_profile

PAGE_TOKENS = 64
ANSWER_TOKENS = 16
PROMPT_TOKENS = {"cpu-tiny": 12_352}
DEFAULT_PROMPT_TOKENS = 38_976
# What the next turn adds to the former, whose last state lies at most a page before its end.
ADDED_TOKENS = 40
WARM_UP_TOKENS = 4 * 1024
ADMIN_KEY = "bench-restore"
_IDS = 190  # of the vocabulary's first, which are ordinary text in every checkpoint
_FIRST_ID = 10
_QUIET_S = 2.0
_QUIET_LIMIT_S = 120.0
_FLUSH_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class First:
    """What one request took until its first token, and what it answered."""

    ttft_s: float
    ids: list[int]
    storage_tokens: int


@dataclass(slots=True)
class Backend:
    """A place to restore from, and what was measured with it."""

    name: str
    kind: str
    config: dict[str, Any]
    ttft_s: list[float] = field(default_factory=list)
    storage_tokens: list[int] = field(default_factory=list)
    equal: bool = True


class Restorable:
    """An engine whose storage backend can be changed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._client = engine.client
        self._client.headers["authorization"] = f"Bearer {ADMIN_KEY}"

    def ask(self, ids: Sequence[int]) -> First:
        """Continue `ids` greedily."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
        }
        answer: list[int] = []
        first_s = 0.0
        meta: dict[str, Any] = {}
        started = time.perf_counter()
        for event in self._engine.stream(body):
            if event["output_ids"] and not answer:
                first_s = time.perf_counter() - started
            answer += event["output_ids"]
            meta = event["meta_info"]
        details: Mapping[str, int] = meta.get("cached_tokens_details") or {}
        return First(first_s, answer, int(details.get("storage") or 0))

    def use(self, backend: Backend) -> None:
        """Empty all caches and store in `backend` from now on."""
        self._client.request("DELETE", "/hicache/storage-backend").raise_for_status()
        self._client.post("/flush_cache", params={"timeout": _FLUSH_LIMIT_S}).raise_for_status()
        response = self._client.put(
            "/hicache/storage-backend",
            json={
                "hicache_storage_backend": backend.kind,
                "hicache_storage_backend_extra_config_json": json.dumps(backend.config),
            },
        )
        if not response.is_success:
            raise EngineFailure(f"the engine does not take the backend {backend.name}: {response.text[:500]}")


def quiet(count: Callable[[], int]) -> int:
    """Wait until `count` stays the same; returns it."""
    end = time.monotonic() + _QUIET_LIMIT_S
    size, since = -1, time.monotonic()
    while time.monotonic() < end:
        found = count()
        if found != size:
            size, since = found, time.monotonic()
        elif found > 0 and time.monotonic() - since > _QUIET_S:
            return size
        time.sleep(0.1)
    raise EngineFailure(f"the store still changes after {_QUIET_LIMIT_S:.0f} s, or holds nothing ({size})")


def store_config(profile: str, url: str) -> dict[str, Any]:
    """The settings with which `profile` would use a Redis server."""
    argv = load_profile(profile).command(Path("model"), 1, store_url=url, draft=None, extra=()).argv
    return json.loads(argv[argv.index("--hicache-storage-backend-extra-config") + 1])


def prompt(tokens: int, seed: int) -> list[int]:
    """Random ids of ordinary text."""
    source = random.Random(seed)
    return [_FIRST_ID + source.randrange(_IDS) for _ in range(tokens)]


def measure(
    model: Path, profile: str, tokens: int, rounds: int, scratch: Path, sockets: Path
) -> dict[str, Any]:
    """Write with one engine, restore with another; returns the report.

    `sockets` is a directory with a path short enough for a unix socket.
    """
    files = scratch / "files"
    files.mkdir()
    long, other = prompt(tokens, 1), prompt(min(tokens, WARM_UP_TOKENS), 2)
    former = long[:-ADDED_TOKENS]
    with server(sockets) as (urls, _):
        counter = redis.Redis.from_url(urls["unix"])
        unix, tcp = (Backend(name, "dynamic", store_config(profile, urls[name])) for name in ("unix", "tcp"))
        threshold = unix.config["prefetch_threshold"]
        file = Backend("file", "file", {"file_storage_path": str(files), "prefetch_threshold": threshold})

        def keys() -> int:
            return int(counter.dbsize())

        def stored() -> int:
            return sum(1 for path in files.iterdir() if path.suffix == ".bin")

        @contextmanager
        def booted(number: int) -> Generator[Engine]:
            note(f"engine {number}: booting")
            started = time.monotonic()
            log, extra = scratch / f"engine-{number}.log", ("--admin-api-key", ADMIN_KEY)
            with running_engine(model, log, profile=profile, store_url=urls["unix"], extra=extra) as engine:
                note(f"engine {number}: booted in {time.monotonic() - started:.0f} s")
                yield engine

        with booted(1) as engine:
            writer = Restorable(engine)
            writer.ask(prompt(tokens, 3))  # compiles and loads what the first request needs
            cold = [writer.ask(former)]
            expected = writer.ask(long).ids
            writer.ask(other)
            quiet(keys)
            writer.use(file)
            cold.append(writer.ask(former))
            writer.ask(other)
            sizes = {"redis_keys": quiet(keys), "files": quiet(stored)}
            note(f"cold: {[round(one.ttft_s, 3) for one in cold]} s; stored {sizes}")
            engine.kill()
        backends = [unix, tcp, file]
        with booted(2) as engine:
            reader = Restorable(engine)
            for backend in backends:
                reader.use(backend)
                reader.ask(other)  # what is loaded and compiled at first use is no backend's time
            for turn in range(rounds):
                for backend in backends[turn % 3 :] + backends[: turn % 3]:
                    reader.use(backend)
                    first = reader.ask(long)
                    backend.ttft_s.append(first.ttft_s)
                    backend.storage_tokens.append(first.storage_tokens)
                    backend.equal &= first.ids == expected
                    note(f"{backend.name}: {first.ttft_s:.3f} s, {first.storage_tokens} tokens from storage")
    return _report(tokens, cold, backends) | {
        "prompt_tokens": tokens,
        "rounds": rounds,
        "profile": profile,
    }


def _report(tokens: int, cold: Sequence[First], backends: Sequence[Backend]) -> dict[str, Any]:
    ttft = {backend.name: statistics.median(backend.ttft_s) for backend in backends}
    slowest = max(ttft["unix"], ttft["tcp"])
    cold_s = min(one.ttft_s for one in cold)
    required = (tokens - ADDED_TOKENS) // PAGE_TOKENS * PAGE_TOKENS
    return {
        "ttft_vs_file": round(ttft["file"] / slowest, 2),
        "ttft_vs_cold": round(cold_s / slowest, 2),
        "cold_ttft_s": round(cold_s, 4),
        "ttft_s": {name: round(seconds, 4) for name, seconds in ttft.items()},
        "fastest_ttft_s": {backend.name: round(min(backend.ttft_s), 4) for backend in backends},
        "restored_tokens": {backend.name: min(backend.storage_tokens) for backend in backends},
        "restored": all(min(backend.storage_tokens) >= required for backend in backends),
        "equal": all(backend.equal for backend in backends) and cold[0].ids == cold[-1].ids,
    }


def main() -> int:
    """Measure and report; 0 when everything was restored and equal."""
    parser = argparse.ArgumentParser(prog="python -m bench.restore", description=__doc__)
    parser.add_argument("--profile", default="cpu-tiny", help="launch profile (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument("--tokens", type=int, help="length of the prompt (default: by the profile)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="restores from each backend (default: %(default)s)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the engines' logs and files in DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    tokens = args.tokens or PROMPT_TOKENS.get(args.profile, DEFAULT_PROMPT_TOKENS)
    if tokens < 2 * PAGE_TOKENS or args.rounds < 1:
        parser.error(f"--tokens {tokens}, --rounds {args.rounds}: give at least {2 * PAGE_TOKENS} and 1")
    if args.model is None and args.profile != "cpu-tiny":
        parser.error(f"profile {args.profile} needs --model, the directory of a checkpoint")
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    with tempfile.TemporaryDirectory(prefix="lhbench") as folder:
        scratch: Path = args.keep or Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        report = measure(model, args.profile, tokens, args.rounds, scratch, Path(folder))
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0 if report["restored"] and report["equal"] else 1


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("from", "TTFT, s", "fastest, s", "tokens from storage", title="a session after a restart")
    table.add_row("nothing (cold)", f"{report['cold_ttft_s']:.3f}", "", "0")
    for name, seconds in report["ttft_s"].items():
        table.add_row(
            name,
            f"{seconds:.3f}",
            f"{report['fastest_ttft_s'][name]:.3f}",
            str(report["restored_tokens"][name]),
        )
    console = Console()
    console.print(table)
    console.print(
        " ".join(f"{name}={report[name]}" for name in ("ttft_vs_file", "ttft_vs_cold", "restored", "equal"))
    )


if __name__ == "__main__":
    sys.exit(main())
