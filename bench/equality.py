"""Whether greedy output is the same however the engine came by its prefix.

Each way boots an engine of its own, plays eight conversations turn by turn, all at once, and compares
every turn with the float32 reference model. A turn is `exact`, a `near tie` (it leaves the reference where
the two likeliest tokens are within 1e-3 of each other), or `wrong`. Exit status 1 when any is wrong.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.engines import Answer, Engine, note, running_engine
from cache_store.servers import own_servers
from model import tiny
from model.reference import ReferenceModel, Step
from model.vocabulary import TEXT_TOKENS
from speculative import draft

NEAR_TIE = 1e-3
GENERATED = 16
# First prompts and what each turn adds: on a page's border, one token before and after it, and in between.
FIRST = (63, 64, 65, 127, 128, 129, 200, 300)
ADDED = (47, 48, 49, 112, 5, 64)
BLOB_BYTES = 2 << 30
SMALL_POOLS = ("--max-total-tokens", "2048", "--max-mamba-cache-size", "48")
PLAIN: Mapping[str, tuple[str, ...]] = {
    "no cache": ("--disable-radix-cache",),
    "radix cache": (),
    "chunked prefill 128": ("--chunked-prefill-size", "128"),
    "small pools": SMALL_POOLS,
}
STORED = ("host tier", "storage after kill -9")
DRAFTED = ("random draft", "fitted draft")
WAYS = (*PLAIN, *STORED, *DRAFTED)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and what the reference answers."""

    prompt: list[int]
    expected: list[Step]


@dataclass(slots=True)
class Tally:
    """How the turns of one way compare with the reference."""

    exact: int = 0
    near_ties: int = 0
    wrong: int = 0
    prompt_tokens: int = 0
    cached: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "storage": 0})
    drafted_rounds: int = 0
    generated: int = 0

    def add(self, turn: Turn, answer: Answer) -> None:
        """Judge one answer."""
        self.prompt_tokens += len(turn.prompt)
        for tier, tokens in answer.tiers.items():
            self.cached[tier] += tokens
        self.generated += len(answer.ids)
        self.drafted_rounds += int(answer.meta.get("spec_verify_ct") or 0)
        expected = [step.token for step in turn.expected]
        if answer.ids == expected:
            self.exact += 1
            return
        pairs = zip(answer.ids, turn.expected, strict=False)
        parting = next((step for token, step in pairs if token != step.token), None)
        if parting is not None and len(answer.ids) == len(expected) and parting.gap < NEAR_TIE:
            self.near_ties += 1
        else:
            self.wrong += 1

    def to_json(self) -> dict[str, object]:
        """Counts, the cached share of the prompts, and the accept length where there was a draft."""
        summary: dict[str, object] = {
            "turns": self.exact + self.near_ties + self.wrong,
            "exact": self.exact,
            "near_ties": self.near_ties,
            "wrong": self.wrong,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": dict(self.cached),
        }
        if self.drafted_rounds:
            summary["accept_length"] = round(self.generated / self.drafted_rounds, 2)
        return summary


def conversations(reference: ReferenceModel, turns: int) -> list[list[Turn]]:
    """Eight conversations of random ids, each continued by the reference's own answers."""
    source = random.Random(20_26)
    result: list[list[Turn]] = []
    for first in FIRST:
        ids = [source.randrange(TEXT_TOKENS) for _ in range(first)]
        played: list[Turn] = []
        for added in ADDED[:turns]:
            expected = reference.greedy(ids, GENERATED)
            played.append(Turn(list(ids), expected))
            ids = [*ids, *(step.token for step in expected)]
            ids += [source.randrange(TEXT_TOKENS) for _ in range(added)]
        result.append(played)
    return result


def play(engine: Engine, talks: Sequence[Sequence[Turn]], tally: Tally, *, first_turn: int = 0) -> None:
    """Send every conversation's turns from `first_turn` on, all conversations at once."""

    def one(talk: Sequence[Turn]) -> list[tuple[Turn, Answer]]:
        return [(turn, engine.generate(turn.prompt, GENERATED)) for turn in talk[first_turn:]]

    with ThreadPoolExecutor(len(talks)) as pool:
        for answers in pool.map(one, talks):
            for turn, answer in answers:
                tally.add(turn, answer)


def successors(talks: Sequence[Sequence[Turn]]) -> dict[int, int]:
    """Each token's latest successor in the reference's answers: a draft of them is accepted in runs."""
    table: dict[int, int] = {}
    for talk in talks:
        for turn in talk:
            ids = [turn.prompt[-1], *(step.token for step in turn.expected)]
            table.update(itertools.pairwise(ids))
    return table


@dataclass(frozen=True, slots=True)
class Stage:
    """What every way plays, and where its files go."""

    model: Path
    talks: Sequence[Sequence[Turn]]
    scratch: Path

    @contextmanager
    def engine(
        self, name: str, *extra: str, store: str | None = None, drafter: Path | None = None
    ) -> Generator[Engine]:
        """The engine of one way."""
        note(f"{name}: booting")
        log = self.scratch / f"{name.replace(' ', '-')}.log"
        with running_engine(self.model, log, store_url=store, draft=drafter, extra=extra) as running:
            yield running

    def plain(self, names: Collection[str]) -> Iterator[tuple[str, Tally]]:
        """An engine on its own, with each of its arguments."""
        for name in (name for name in PLAIN if name in names):
            tally = Tally()
            with self.engine(name, *PLAIN[name]) as running:
                play(running, self.talks, tally)
                if name == "small pools":  # what the first pass left was evicted in part: A, B, A
                    play(running, self.talks, tally)
            yield name, tally

    def stored(self, names: Collection[str]) -> Iterator[tuple[str, Tally]]:
        """Host tier and store; the second engine finds what the first, killed, left in the store."""
        if not set(STORED) & set(names):
            return
        host, storage = STORED
        blobs, _ = own_servers(self.scratch, blob_bytes=BLOB_BYTES)
        with blobs:
            tally = Tally()
            with self.engine(host, *SMALL_POOLS, store=blobs.url) as running:
                play(running, self.talks, tally)
                play(running, self.talks, tally)
                running.kill()
            yield host, tally
            tally = Tally()
            with self.engine(storage, store=blobs.url) as running:
                play(running, self.talks, tally, first_turn=len(self.talks[0]) - 1)
            yield storage, tally

    def drafted(self, names: Collection[str]) -> Iterator[tuple[str, Tally]]:
        """DSPARK with a draft that is nearly always rejected, and with one that is accepted in runs."""
        random_draft, fitted = DRAFTED
        for name, table in ((random_draft, None), (fitted, successors(self.talks))):
            if name in names:
                path = self.scratch / name.replace(" ", "-")
                draft.build(path, self.model, successors=table)
                tally = Tally()
                with self.engine(name, drafter=path) as running:
                    play(running, self.talks, tally)
                yield name, tally


def main() -> int:
    """Measure and report; 0 when nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.equality", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument(
        "--turns", type=int, default=len(ADDED), help="turns a conversation (default: %(default)s)"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=f"some of: {', '.join(WAYS)}"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the engines' logs there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if not 1 <= args.turns <= len(ADDED):
        parser.error(f"--turns {args.turns}: give 1 to {len(ADDED)}")
    model: Path = args.model or tiny.build(tiny.default_path()).path
    note("reference: answering every turn")
    torch.set_num_threads(1)  # its matrices are too small for more
    talks = conversations(ReferenceModel.load(model), args.turns)
    rows: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory(prefix="longhaul-equality-") as temporary:
        scratch: Path = args.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        stage = Stage(model.absolute(), talks, scratch.absolute())
        for name, tally in itertools.chain(
            stage.plain(args.ways), stage.stored(args.ways), stage.drafted(args.ways)
        ):
            note(f"{name}: {tally.exact} exact, {tally.near_ties} near ties, {tally.wrong} wrong")
            rows[name] = tally
    totals = {
        kind: sum(getattr(tally, kind) for tally in rows.values()) for kind in ("exact", "near_ties", "wrong")
    }
    if args.json:
        print(json.dumps({**totals, "ways": {name: tally.to_json() for name, tally in rows.items()}}))
    else:
        _show(rows)
    return 1 if totals["wrong"] else 0


def _show(rows: Mapping[str, Tally]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "way", "exact", "near ties", "wrong", "prompt tokens", "device", "host", "storage", "accepted"
    )
    for name, tally in rows.items():
        accepted = f"{tally.generated / tally.drafted_rounds:.2f}" if tally.drafted_rounds else ""
        counts = (tally.exact, tally.near_ties, tally.wrong, tally.prompt_tokens, *tally.cached.values())
        table.add_row(name, *map(str, counts), accepted)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
