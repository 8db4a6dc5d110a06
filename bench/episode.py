"""Whether an agent's episode survives its engine: tool calls, `kill -9` in the middle, the rest from storage.

The small K3 plays a held-out episode. The float32 reference model, which has no cache and is never
interrupted, plays it first; then engines have to write the same tokens, without a draft and with one that is
accepted in runs. Each way's first engine is killed after a turn that called a tool; a second one, with
nothing but what lies in Redis, gets the result of that call and plays to the end. Exit status 1 when a token
differs, a task ends wrongly, or storage gave less than it holds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from bench.engines import Engine, EngineFailure, note, running_engine
from bench.equality import Tally, Turn, successors
from bench.restart import PAGE_TOKENS, SLACK_TOKENS, settled
from cache_store.servers import own_servers
from model import small
from model.encoding import generation_segments, head_segments, messages_segments
from model.reference import ReferenceModel
from model.tasks.lexicon import Split
from model.tasks.session import Session
from model.tasks.task import Task, play
from model.tokenizer import K3Tokenizer
from service.channels import ChannelParser
from service.conversation import Completion
from speculative import draft

TASKS: Final = 6
WAYS: Final = ("no draft", "draft")
_BLOB_BYTES: Final = 1 << 30
_MOST_TOKENS: Final = 400
_MOST_REPLIES: Final = 8


@dataclass(frozen=True, slots=True)
class Episode:
    """What the reference played. `cut` is the turn before which the engine is killed."""

    turns: Sequence[Turn]
    cut: int
    tasks: int
    right_tasks: int

    def __post_init__(self) -> None:
        assert 0 < self.cut < len(self.turns), "something to play before and after"


class Player:
    """The reference model as an agent."""

    def __init__(self, model: Path, seed: int) -> None:
        self._reference = ReferenceModel.load(model)
        self._tokenizer = K3Tokenizer.load(model)
        rng = Random(f"episode/{seed}")
        self._session = Session.draw(rng, Split.HELD_OUT)
        self._ids = self._tokenizer.encode_segments(head_segments(self._session.environment.schema()))
        self._turns: list[Turn] = []
        self._after_call: list[int] = []

    def episode(self, tasks: int) -> Episode:
        """Play so many tasks; raises `EngineFailure` for an episode without a tool call in its middle."""
        right = sum(self._play(self._session.next_task()) for _ in range(tasks))
        middle = len(self._turns) / 2
        if not self._after_call:
            raise EngineFailure("the episode calls no tool: take another --seed")
        cut = min(self._after_call, key=lambda turn: abs(turn - middle))
        return Episode(self._turns, cut, tasks, right)

    def _play(self, task: Task) -> bool:
        environment = self._session.environment
        expected_world = environment.fork()
        expected = play(task, expected_world)
        self._session.keep(None if task.fact is None or task.fact.is_secret else task.fact)
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        calls: list[dict[str, Any]] = []
        for _ in range(_MOST_REPLIES):
            completion = self._reply(messages, calls)
            if not completion.calls:
                values = all(value in completion.text for value in expected.values)
                return values and environment.state() == expected_world.state()
            self._after_call.append(len(self._turns))
            calls = completion.message()["tool_calls"]
            messages = [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": environment.call(call.name, call.arguments).text,
                }
                for call in completion.calls
            ]
        return False

    def _reply(self, messages: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]) -> Completion:
        segments = [*messages_segments(messages, calls=calls), *generation_segments()]
        prompt = self._ids + self._tokenizer.encode_segments(segments)
        steps = self._reference.greedy(prompt, _MOST_TOKENS, self._tokenizer.eos_ids)
        answer = [step.token for step in steps]
        self._turns.append(Turn(prompt, steps))
        self._ids = prompt + answer
        parser = ChannelParser(self._tokenizer)
        parser.feed(answer)
        parser.finish()
        return parser.completion("stop")


def interrupted(model: Path, episode: Episode, scratch: Path, drafter: Path | None) -> dict[str, Any]:
    """Play the episode with two engines, the first killed before turn `cut`."""
    scratch.mkdir(parents=True)
    tally = Tally()
    blobs, _ = own_servers(scratch, blob_bytes=_BLOB_BYTES)

    def send(engine: Engine, turn: Turn) -> dict[str, int]:
        answer = engine.generate(turn.prompt, len(turn.expected))
        tally.add(turn, answer)
        return answer.tiers

    with blobs:
        with running_engine(model, scratch / "engine-1.log", store_url=blobs.url, draft=drafter) as engine:
            for turn in episode.turns[: episode.cut]:
                send(engine, turn)
            settled(blobs)
            engine.kill()
        with running_engine(model, scratch / "engine-2.log", store_url=blobs.url, draft=drafter) as engine:
            restored = send(engine, episode.turns[episode.cut])["storage"]
            for turn in episode.turns[episode.cut + 1 :]:
                send(engine, turn)
    known = len(episode.turns[episode.cut - 1].prompt)
    required = max(PAGE_TOKENS, known // PAGE_TOKENS * PAGE_TOKENS - SLACK_TOKENS)
    return {
        "restored_tokens": restored,
        "required_tokens": required,
        "holds": tally.wrong == 0 and restored >= required,
        **tally.to_json(),
    }


def main() -> int:
    """Measure and report; 0 when the episode ended as it does without an interruption."""
    parser = argparse.ArgumentParser(prog="python -m bench.episode", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the small K3)")
    parser.add_argument("--draft", type=Path, help="its DSpark draft (default: one fitted to the episode)")
    parser.add_argument("--tasks", type=int, default=TASKS, help="of the episode (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the episode (default: %(default)s)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=f"some of: {', '.join(WAYS)}"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and Redis data there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if args.tasks < 1:
        parser.error(f"--tasks {args.tasks}: give at least 1")
    model: Path = (args.model or small.build(small.default_path())).absolute()
    torch.set_num_threads(1)  # its matrices are too small for more
    note("reference: playing the episode")
    episode = Player(model, args.seed).episode(args.tasks)
    note(f"{len(episode.turns)} turns, {episode.right_tasks} of {episode.tasks} tasks right")
    ways: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="longhaul-episode-") as temporary:
        scratch: Path = (args.keep or Path(temporary)).absolute()
        for name in args.ways:
            fitted: Path = scratch / "fitted"
            if name == "draft" and args.draft is None:
                draft.build(fitted, model, successors=successors([episode.turns]))
            drafter = args.draft or fitted if name == "draft" else None
            ways[name] = interrupted(model, episode, scratch / name.replace(" ", "-"), drafter)
            note(f"{name}: {ways[name]}")
    result = {
        "turns": len(episode.turns),
        "killed_before_turn": episode.cut + 1,
        "tasks": episode.tasks,
        "tasks_right": episode.right_tasks,
        "output_tokens": sum(len(turn.expected) for turn in episode.turns),
        "ways": ways,
    }
    if args.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0 if episode.right_tasks == episode.tasks and all(way["holds"] for way in ways.values()) else 1


def _show(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{result['tasks_right']} of {result['tasks']} tasks right, {result['turns']} turns, "
        f"killed before turn {result['killed_before_turn']}"
    )
    table = Table("way", "exact", "near ties", "wrong", "restored", "accepted", title=title)
    for name, way in result["ways"].items():
        cells = (way["exact"], way["near_ties"], way["wrong"], way["restored_tokens"])
        table.add_row(name, *map(str, cells), str(way.get("accept_length", "")))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
