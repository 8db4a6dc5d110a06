"""What storing KDA states as bfloat16 does to answers: greedy output and log-probabilities.

Sessions of several turns, every turn restored from storage with empty caches, so that each one starts from
a state that went through the store, and stores its own: rounding adds up as it would in use. The prompts are
the same in all runs. Compared with never leaving the engine are states stored exactly, which must change
nothing but the order of sums, and states stored as bfloat16. Exit status 1 unless every turn but the first
was restored.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from bench.engines import Engine, note, running_engine
from bench.restore import ADMIN_KEY, Backend, Restorable, prompt, quiet, store_config
from bench.store import server
from model import tiny
from model.tokenizer import K3Tokenizer

PROFILE = "cpu-tiny"
FIRST_TOKENS = 500
TURN_TOKENS = 200
ANSWER_TOKENS = 32
_AT_ONCE = 4
WAYS = ("kept in the engine", "exact", "bfloat16")


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: ids, the log-probability of each, and how much of its prompt came from where."""

    ids: list[int]
    logprobs: list[float]
    storage_tokens: int


@dataclass(frozen=True, slots=True)
class Change:
    """One way's answers against another's, turn by turn.

    Attributes:
        diverged: answers that differ at some token, of `answers`.
        first: position of the first token that differs, of each that does.
        logprob: absolute change of each token's log-probability, in nats, as far as the answers are equal.
    """

    answers: int
    first: list[int]
    logprob: list[float]

    @classmethod
    def between(cls, mine: Sequence[Reply], theirs: Sequence[Reply]) -> "Change":
        """Compare two ways, the same turns in the same order."""
        first: list[int] = []
        logprob: list[float] = []
        for a, b in zip(mine, theirs, strict=True):
            equal = next(
                (at for at, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), len(a.ids)
            )
            if equal < len(a.ids):
                first.append(equal)
            logprob += [abs(x - y) for x, y in zip(a.logprobs[:equal], b.logprobs[:equal], strict=True)]
        return cls(len(mine), first, logprob)

    def to_json(self) -> dict[str, Any]:
        """Shares, and changes in nats."""
        return {
            "answers": self.answers,
            "diverged": len(self.first),
            "first_divergence_median": statistics.median(self.first) if self.first else None,
            "tokens_compared": len(self.logprob),
            "logprob_change_mean": float(f"{statistics.fmean(self.logprob):.3g}") if self.logprob else None,
            "logprob_change_max": float(f"{max(self.logprob):.3g}") if self.logprob else None,
        }


def ask(engine: Engine, ids: Sequence[int]) -> Reply:
    """Continue `ids` greedily."""
    body = {
        "input_ids": list(ids),
        "return_logprob": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
    }
    meta = engine.ask(body)["meta_info"]
    tokens: list[tuple[float, int, Any]] = meta["output_token_logprobs"]
    details: Mapping[str, int] = meta.get("cached_tokens_details") or {}
    return Reply([t[1] for t in tokens], [t[0] for t in tokens], int(details.get("storage") or 0))


def sessions(count: int, turns: int, text: Sequence[int] = ()) -> list[list[list[int]]]:
    """The prompts of each turn of each session: each begins with the one before.

    They are random ids, or successive parts of `text`, which must be long enough.
    """
    length = FIRST_TOKENS + TURN_TOKENS * (turns - 1)
    if text:
        whole = [list(text[at * length : (at + 1) * length]) for at in range(count)]
    else:
        whole = [prompt(length, 100 + number) for number in range(count)]
    return [[ids[: FIRST_TOKENS + TURN_TOKENS * turn] for turn in range(turns)] for ids in whole]


def measure(
    model: Path, talks: Sequence[Sequence[Sequence[int]]], scratch: Path, sockets: Path
) -> dict[str, Any]:
    """Play all ways on one engine; `sockets` has a path short enough for a unix socket."""
    count, turns = len(talks), len(talks[0])
    replies: dict[str, list[Reply]] = {way: [] for way in WAYS}
    stored: dict[str, int] = {}
    with server(sockets) as (urls, _):
        client = redis.Redis.from_url(urls["unix"])

        def stores(dtype: str) -> Backend:
            config = store_config(PROFILE, urls["unix"]) | {"state_dtype": dtype}
            return Backend(dtype, "dynamic", config)

        extra = ("--admin-api-key", ADMIN_KEY)
        log = scratch / "engine.log"
        note("booting")
        with (
            running_engine(model, log, profile=PROFILE, store_url=urls["unix"], extra=extra) as engine,
            ThreadPoolExecutor(_AT_ONCE) as pool,
        ):
            changing = Restorable(engine)
            for way in WAYS:
                client.flushall()
                backend = stores("exact" if way == WAYS[0] else way)
                changing.use(backend)
                for turn in range(turns):
                    if turn and way != WAYS[0]:
                        quiet(lambda: int(client.dbsize()))
                        changing.use(backend)
                    prompts = [talk[turn] for talk in talks]
                    replies[way] += pool.map(ask, [engine] * count, prompts)
                    note(f"{way}: turn {turn + 1} of {turns}")
                quiet(lambda: int(client.dbsize()))
                stored[way] = sum(client.strlen(key) for key in client.scan_iter(match="*:mamba:*"))
    later = {way: found[count:] for way, found in replies.items()}
    return {
        **{
            way: Change.between(later[way], later[WAYS[0]]).to_json() | {"state_bytes_stored": stored[way]}
            for way in WAYS[1:]
        },
        "bfloat16_against_exact": Change.between(later["bfloat16"], later["exact"]).to_json(),
        "restored": all(
            reply.storage_tokens >= FIRST_TOKENS // 2 for way in WAYS[1:] for reply in later[way]
        ),
        "sessions": count,
        "turns": turns,
    }


def main() -> int:
    """Measure and report; 0 when every later turn was restored from storage."""
    parser = argparse.ArgumentParser(prog="python -m bench.state_dtype", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument("--sessions", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of each session (default: %(default)s)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="prompts from this text, not random ids")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the engine's log in DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if args.sessions < 1 or args.turns < 2:
        parser.error("give at least 1 session of 2 turns")
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    text: list[int] = []
    if args.text:
        text = K3Tokenizer.load(model).encode_text(args.text.read_text(encoding="utf-8"))
        needed = args.sessions * (FIRST_TOKENS + TURN_TOKENS * (args.turns - 1))
        if len(text) < needed:
            parser.error(f"--text {args.text} has {len(text)} tokens, and {needed} are needed")
    talks = sessions(args.sessions, args.turns, text)
    with tempfile.TemporaryDirectory(prefix="lhbench") as folder:
        scratch: Path = args.keep or Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        report = measure(model, talks, scratch, Path(folder))
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0 if report["restored"] else 1


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("states stored", "answers", "diverged", "at token", "mean change", "largest", "state bytes")
    for way in WAYS[1:]:
        found = report[way]
        table.add_row(
            way,
            str(found["answers"]),
            str(found["diverged"]),
            str(found["first_divergence_median"] or ""),
            f"{found['logprob_change_mean'] or 0:.2e}",
            f"{found['logprob_change_max'] or 0:.2e}",
            f"{found['state_bytes_stored']:,}",
        )
    console = Console()
    console.print(table)
    console.print("against a session that never leaves the engine; changes of log-probability in nats")


if __name__ == "__main__":
    sys.exit(main())
