"""Whether a session survives its engine under tensor parallelism.

An engine with a draft on two ranks plays three turns and is killed; a second one restores the next turn; a
third, on one rank, must find nothing of it in the same Redis. Every answer is compared with the float32
reference. Exit status 1 unless every answer is right, and the restored one came from storage.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from bench.engines import Answer, Engine, note, running_engine
from bench.redis_process import RedisProcess
from bench.restart import NEAR_TIE
from bench.restore import quiet
from model import tiny
from model.reference import ReferenceModel
from speculative import draft

PAGE_TOKENS = 64
ANSWER_TOKENS = 12
TURNS = (500, 70, 130, 60)
RANKS = 2
# SGLang's variable: which cores each rank's threads are bound to.
BINDING = ("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
_IDS = 200


class Session:
    """Turns of random ids, whose answers are compared with the reference."""

    def __init__(self, model: Path) -> None:
        self._reference = ReferenceModel.load(model)
        self._random = random.Random(7)
        self.ids: list[int] = []
        self.wrong = 0

    def ask(self, engine: Engine, added: int) -> Answer:
        """Add ids and the answer to them."""
        self.ids += [self._random.randrange(_IDS) for _ in range(added)]
        answer = self.again(engine)
        self.ids += answer.ids
        return answer

    def again(self, engine: Engine) -> Answer:
        """Ask what is there, and keep nothing."""
        answer = engine.generate(self.ids, ANSWER_TOKENS)
        steps = self._reference.greedy(tuple(self.ids), ANSWER_TOKENS)
        parting = next((s for token, s in zip(answer.ids, steps, strict=True) if token != s.token), None)
        self.wrong += parting is not None and parting.gap >= NEAR_TIE
        return answer


def engines(model: Path, folder: Path) -> dict[str, Any]:
    """Three engines over one store; returns the report."""
    os.environ.update([BINDING])
    server, session = RedisProcess(folder), Session(model)
    server.start()
    client = server.client()
    draft.build(folder / "draft", model)
    several = ("--tp", str(RANKS))
    try:
        log = folder / "engine.log"
        with running_engine(
            model, log, store_url=server.unix_url, draft=folder / "draft", extra=several
        ) as first:
            for added in TURNS[:-1]:
                session.ask(first, added)
            quiet(lambda: int(client.dbsize()))
            first.kill()
        keys = [key.decode() for key in client.scan_iter("lh1:*")]
        note(f"{len(keys)} keys of {sorted({shape(key) for key in keys})}")
        known = len(session.ids) - ANSWER_TOKENS
        with running_engine(
            model, log, store_url=server.unix_url, draft=folder / "draft", extra=several
        ) as second:
            restored = session.ask(second, TURNS[-1])
            read = pages_read(second)
        note(f"after the restart: {restored.tiers}, pages read by all ranks: {read}")
        del os.environ[BINDING[0]]
        with running_engine(model, log, store_url=server.unix_url, draft=folder / "draft") as alone:
            other = session.again(alone)
        note(f"on one rank: {other.tiers}")
    finally:
        server.kill()
    return {
        "restored_tokens": restored.tiers["storage"],
        "required_tokens": known // PAGE_TOKENS * PAGE_TOKENS - 2 * PAGE_TOKENS,
        "other_geometry_tokens": other.tiers["storage"],
        "wrong_outputs": session.wrong,
        "keys": sorted({shape(key) for key in keys}),
        "pages_read": read,
    }


def shape(key: str) -> str:
    """A key's pool, and which rank's part it is."""
    parts = key.split(":")
    return ":".join([parts[2], *parts[4:5]]) if len(parts) < 6 else parts[2]


def pages_read(engine: Engine) -> dict[str, int]:
    """Pages read from the store, by pool, over all ranks."""
    text = httpx.get(f"{engine.url}/metrics", timeout=60).text
    pattern = r'^longhaul_store_pages_total{direction="read",outcome="ok",pool="(\w+)"} (\S+)$'
    return {pool: int(float(count)) for pool, count in re.findall(pattern, text, re.MULTILINE)}


def main() -> int:
    """Measure and report; 0 when all answers were right."""
    parser = argparse.ArgumentParser(prog="python -m bench.parallel", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    with tempfile.TemporaryDirectory(prefix="lh") as folder:
        report = engines(model, Path(folder))
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    held = (
        report["restored_tokens"] >= report["required_tokens"]
        and report["other_geometry_tokens"] == 0
        and report["wrong_outputs"] == 0
    )
    return 0 if held else 1


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "value", title="tensor parallelism")
    for name, value in report.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
