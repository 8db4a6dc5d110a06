"""`longhaul model eval`: held-out episodes through the gateway, by the openai package."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from model.evaluation.player import Conversation, Counts, Judgement, Tally, fact_of
from model.evaluation.server import Endpoints, ServerFailure, serving
from model.tasks import lookups, talk
from model.tasks.environment import Environment, World
from model.tasks.lexicon import Split
from model.tasks.session import Session
from model.tasks.task import Fact, Task
from model.tasks.world import draw

if TYPE_CHECKING:
    from openai import OpenAI  # not for `--help`, nor where a model is only trained

_TIMEOUT_S: Final = 300.0
_MOST_TASKS: Final = 4
_TOLD_EVERY: Final = 20


def add_arguments(actions: Any) -> None:
    """Declare `longhaul model eval`."""
    parser = actions.add_parser(
        "eval",
        help="play held-out episodes",
        description="Play held-out episodes through the gateway and measure how they end.",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint to serve (default: the small K3)"
    )
    parser.add_argument("--url", help="a running gateway instead, such as http://127.0.0.1:8000")
    parser.add_argument("--engine-url", help="the engine behind it, for what is lost without the ledger")
    parser.add_argument("--episodes", type=int, default=40, help="short ones (default: %(default)s)")
    parser.add_argument(
        "--sessions", type=int, default=6, help="long ones, for recall (default: %(default)s)"
    )
    parser.add_argument(
        "--turns", type=int, default=40, help="between fact and question (default: %(default)s)"
    )
    parser.add_argument("--parallel", type=int, default=8, help="at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the episodes (default: %(default)s)")
    parser.add_argument("--failures", type=Path, metavar="FILE", help="write failed tasks there, one a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0 when it was measured, 1 when nothing could be served, 2 for bad arguments."""
    if args.url and not args.engine_url:
        print("longhaul model eval: --url needs --engine-url, to measure without the ledger", file=sys.stderr)
        return 2
    if min(args.episodes, args.sessions, args.turns, args.parallel) < 1:
        print("longhaul model eval: counts must be at least 1", file=sys.stderr)
        return 2
    start = time.monotonic()
    try:
        with nullcontext(Endpoints(args.url, args.engine_url)) if args.url else serving(_model(args)) as at:
            result = evaluate(at, args)
    except (ServerFailure, OSError) as error:
        print(f"longhaul model eval: {error}", file=sys.stderr)
        return 1
    result["seconds"] = round(time.monotonic() - start, 1)
    if args.json:
        print(json.dumps(result))
        return 0
    _show(result)
    return 0


def _model(args: argparse.Namespace) -> Path:
    from model import small  # torch

    return args.model.absolute() if args.model else small.build(small.default_path())


@dataclass(slots=True)
class _Episode:
    """What one conversation gave."""

    judgements: list[Judgement]
    counts: Counts
    recalled: list[tuple[bool, bool, bool]]
    """For each fact asked for: is it secret, was it recalled, was it without the ledger."""


def evaluate(at: Endpoints, args: argparse.Namespace) -> dict[str, Any]:
    """Play all episodes, some at once."""
    from openai import OpenAI

    gateway, engine = (
        OpenAI(base_url=f"{url}/v1", api_key="none", timeout=_TIMEOUT_S, max_retries=0)
        for url in (at.gateway, at.engine)
    )
    progress = Progress()
    work: list[Callable[[], _Episode]] = []
    for n in range(args.sessions):  # long ones first
        rng = Random(f"{args.seed}/long/{n}")
        work.append(_Long(gateway, engine, rng, args.turns, progress).play)
        progress.tasks += args.turns + len(_TOLD)
    for n in range(args.episodes):
        rng = Random(f"{args.seed}/short/{n}")
        session = Session.draw(rng, Split.HELD_OUT)
        tasks = rng.randrange(1, _MOST_TASKS + 1)
        work.append(lambda session=session, tasks=tasks: _short(gateway, session, tasks, progress))
        progress.tasks += tasks
    pool = ThreadPoolExecutor(args.parallel)
    try:
        episodes = list(pool.map(_call, work))
    finally:
        # Interrupted, it waits for no episode: the service ends next, and what is played fails at once.
        pool.shutdown(wait=False, cancel_futures=True)
    if args.failures is not None:
        failed = [j for episode in episodes for j in episode.judgements if not j.is_right]
        lines = (json.dumps({"kind": j.kind, "answer": j.answer, "reasoning": j.reasoning}) for j in failed)
        args.failures.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return _summary(episodes[args.sessions :], episodes)


@dataclass(slots=True)
class Progress:
    """Tasks to play and played, told on standard error now and then."""

    tasks: int = 0
    played: int = 0
    right: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, judgement: Judgement) -> None:
        """Count one; for several threads."""
        with self._lock:
            self.played += 1
            self.right += judgement.is_right
            if self.played % _TOLD_EVERY == 0 or self.played == self.tasks:
                line = f"{self.played} of {self.tasks} tasks played, {self.right} right"
                print(line, file=sys.stderr, flush=True)


def _call(play: Callable[[], _Episode]) -> _Episode:
    return play()


def _short(client: OpenAI, session: Session, tasks: int, progress: Progress) -> _Episode:
    conversation = Conversation(client, session.environment)
    judgements: list[Judgement] = []
    for _ in range(tasks):
        task = session.next_task()
        judgement = conversation.play(task)
        progress.add(judgement)
        session.keep(fact_of(task, judgement))
        judgements.append(judgement)
    return _Episode(judgements, conversation.counts, [])


_TOLD: Final = (talk.secret, talk.remember, lookups.lookup, talk.secret)
_BETWEEN: Final = (talk.small_talk, talk.repeat, talk.remember, lookups.lookup)


@dataclass(slots=True)
class _Long:
    """Facts told, looked up and chosen in secret; `turns` turns of other things; then the questions."""

    client: OpenAI
    engine: OpenAI
    rng: Random
    turns: int
    progress: Progress

    def play(self) -> _Episode:
        """Play it, and ask with the ledger and without."""
        world = draw(self.rng, Split.HELD_OUT)
        conversation = Conversation(self.client, Environment(world))
        judgements: list[Judgement] = []
        facts: list[Fact] = []
        for family in _TOLD:
            task = family(self.rng, world, Split.HELD_OUT)
            judgements.append(conversation.play(task))
            self.progress.add(judgements[-1])
            if (fact := fact_of(task, judgements[-1])) is not None:
                facts.append(fact)
        asked = {fact.question for fact in facts}
        for _ in range(self.turns):
            while (task := self._other(world)).fact and task.fact.question in asked:
                pass
            judgements.append(conversation.play(task))
            self.progress.add(judgements[-1])
        recalled: list[tuple[bool, bool, bool]] = []
        for fact in facts:
            question = {"role": "user", "content": fact.question}
            found = [conversation.request(at, [question]).content or "" for at in (self.client, self.engine)]
            recalled.append((fact.is_secret, fact.value in found[0], fact.value in found[1]))
        return _Episode(judgements, conversation.counts, recalled)

    def _other(self, world: World) -> Task:
        return self.rng.choice(_BETWEEN)(self.rng, world, Split.HELD_OUT)


def _share(found: list[bool]) -> float | None:
    return round(sum(found) / len(found), 4) if found else None


def _summary(short: list[_Episode], episodes: list[_Episode]) -> dict[str, Any]:
    tally = Tally()
    for episode in episodes:
        for judgement in episode.judgements:
            tally.add(judgement)
    calls = sum(episode.counts.calls for episode in episodes)
    valid = sum(episode.counts.valid_calls for episode in episodes)
    asked = [fact for episode in episodes for fact in episode.recalled]
    return {
        "episode_success": _share([all(j.is_right for j in episode.judgements) for episode in short]),
        "task_success": _share([j.is_right for episode in episodes for j in episode.judgements]),
        "valid_calls": round(valid / calls, 4) if calls else None,
        "copy_exact": round(tally.exact_copies / tally.copies, 4) if tally.copies else None,
        "recall": _share([restored for _, restored, _ in asked]),
        "recall_without_ledger": _share([bare for _, _, bare in asked]),
        "recall_of_reasoning": _share([restored for is_secret, restored, _ in asked if is_secret]),
        "recall_of_reasoning_without_ledger": _share([bare for is_secret, _, bare in asked if is_secret]),
        "by_kind": tally.by_kind(),
        "episodes": len(short),
        "tasks": sum(tally.played.values()),
        "calls": calls,
        "facts": len(asked),
        "requests": sum(episode.counts.requests for episode in episodes),
        "output_tokens": sum(episode.counts.output_tokens for episode in episodes),
    }


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value")
    for name, value in result.items():
        if name == "by_kind":
            for kind, share in value.items():
                table.add_row(f"task: {kind}", f"{share:.3f}")
        else:
            table.add_row(name, "" if value is None else str(value))
    Console().print(table)
