"""How fast a model decodes with its draft and without, in agent sessions that it plays itself.

Held-out sessions begin as the script plays them, up to a context; from there on the model answers greedily,
and its calls are executed. One engine with the draft and one without play the same sessions: one after
another, timed from a message's first token to its last, then all at once, timed as a whole. With
`--reference` the log probabilities that the engine without a draft gives the sessions' prompts stand beside
those of the trainer's network.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Final

from bench.agreement import Judge
from bench.engines import Engine, EngineFailure, Way, boot_each, note
from model import small
from model.encoding import END_OF_MESSAGE
from model.tasks.lexicon import Split
from model.tokenizer import K3Tokenizer
from model.training.documents import Encoder
from speculative.players import Player, Request

WAYS: Final = ("no draft", "draft")
_MOST_TOKENS: Final = 400


@dataclass(frozen=True, slots=True)
class Message:
    """One answer: its ids, how many came after the first ones and in how many seconds, and how often a draft
    was verified."""

    ids: list[int]
    timed: int
    seconds: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Play:
    """What is played: so many sessions, so many messages of each."""

    model: Path
    seed: int
    sessions: int
    messages: int


class Table:
    """The users and tools of sessions, and a model that answers them."""

    def __init__(self, play: Play, engine: Engine) -> None:
        self.play = play
        self.engine = engine
        self._tokenizer = K3Tokenizer.load(play.model)
        self._encoder = Encoder(self._tokenizer)
        self._end = self._tokenizer.markup[END_OF_MESSAGE]

    def player(self, number: int, context: int) -> Player:
        """The user and the tools of one session, from its `context` on."""
        request = Request(f"decode/{self.play.seed}/{number}", Split.HELD_OUT, context)
        return Player(request, self._tokenizer, self._encoder)

    def session(self, number: int, context: int) -> list[Message]:
        """Play one session from its `context` on."""
        player = self.player(number, context)
        ids = list(player.prompt)
        found: list[Message] = []
        for _ in range(self.play.messages):
            message = self._answer(ids)
            found.append(message)
            ids += message.ids
            ids += player.answer(message.ids)
        return found

    def _answer(self, ids: Sequence[int]) -> Message:
        ends = self._tokenizer.eos_ids
        body = {
            "input_ids": list(ids),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": _MOST_TOKENS,
                "stop_token_ids": sorted(ends),
            },
        }
        answer: list[int] = []
        first = last = 0.0
        at_first = 0
        meta: dict[str, Any] = {}
        for event in self.engine.stream(body):
            last = time.perf_counter()
            first = first or last
            if not answer:
                at_first = len(event["output_ids"])
            answer += event["output_ids"]
            meta = event["meta_info"]
        if not answer:
            raise EngineFailure("/generate answered nothing")
        timed = len(answer) - at_first
        if answer[-1] not in ends:
            answer.append(self._end)
        return Message(answer, timed, last - first, int(meta.get("spec_verify_ct") or 0))


def measure(table: Table, contexts: Sequence[int]) -> tuple[dict[str, Any], list[list[Message]]]:
    """Figures by context, and the messages of all sessions that were played one after another."""
    sessions = table.play.sessions
    numbers = range(sessions)
    by_context: dict[str, Any] = {}
    played: list[list[Message]] = []
    for context in contexts:
        table.session(sessions, context)  # compiles what a first request compiles
        alone = [table.session(number, context) for number in numbers]
        played += alone
        messages = [message for session in alone for message in session]
        tokens = sum(message.timed for message in messages)
        drafted = sum(len(message.ids) - 1 for message in messages)
        rounds = sum(message.rounds for message in messages)
        with ThreadPoolExecutor(sessions) as pool:
            list(pool.map(table.session, numbers, repeat(context)))
            began = time.perf_counter()
            together = list(pool.map(table.session, numbers, repeat(context)))
            seconds = time.perf_counter() - began
        written = sum(len(message.ids) for session in together for message in session)
        by_context[str(context)] = {
            "tokens_per_second_alone": round(tokens / sum(message.seconds for message in messages), 1),
            "tokens_per_second_together": round(written / seconds, 1),
            "tokens": tokens,
            **({"accept_length": round(drafted / rounds, 3)} if rounds else {}),
        }
        note(f"context {context}: {by_context[str(context)]}")
    return by_context, played


def _agreement(table: Table, reference: Path, contexts: Sequence[int]) -> dict[str, Any]:
    judge = Judge(reference)
    agrees: dict[str, Any] = {}
    for context in contexts:
        prompts = [table.player(number, context).prompt for number in range(min(2, table.play.sessions))]
        agrees[str(context)] = judge.compare(table.engine, prompts)
        note(f"context {context}: {agrees[str(context)]}")
    return agrees


def main() -> int:
    """Measure and report; 0 when both engines played to the end."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the small K3)")
    parser.add_argument("--draft", type=Path, required=True, help="its DSpark draft")
    parser.add_argument("--profile", default="cpu-tiny", help="launch profile (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=4, help="at once (default: %(default)s)")
    parser.add_argument("--messages", type=int, default=6, help="of each session (default: %(default)s)")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024], metavar="TOKENS", help="default: 1024"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sessions (default: %(default)s)")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="DIR",
        help="what --model is a padded copy of, or --model itself",
    )
    parser.add_argument(
        "--both", action="store_true", help="boot both engines at once (not the measurements)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the engines' logs there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if min(args.sessions, args.messages) < 1:
        parser.error("give at least 1 of --sessions and --messages")
    model: Path = (args.model or small.build(small.default_path())).absolute()
    play = Play(model, args.seed, args.sessions, args.messages)
    ways: dict[str, dict[str, Any]] = {}
    talks: dict[str, list[list[Message]]] = {}
    agrees: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="longhaul-decode-") as temporary:
        scratch: Path = args.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        engines = {WAYS[0]: Way(), WAYS[1]: Way(args.draft.absolute())}
        for way, engine in boot_each(model, args.profile, engines, scratch, at_once=args.both):
            note(f"{way}: booted")
            table = Table(play, engine)
            if args.reference and way == WAYS[0]:
                agrees = _agreement(table, args.reference, args.contexts)
            ways[way], talks[way] = measure(table, args.contexts)
    pairs = [
        plain.ids == drafted.ids
        for one, other in zip(*(talks[way] for way in WAYS), strict=True)
        for plain, drafted in zip(one, other, strict=True)
    ]
    result = {
        "profile": args.profile,
        "sessions": args.sessions,
        "equal_messages": sum(pairs),
        "messages": len(pairs),
        "ways": ways,
        **({"agreement": agrees} if agrees else {}),
        **{f"speedup_{how}": _speedup(ways, f"tokens_per_second_{how}") for how in ("alone", "together")},
    }
    if args.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0


def _speedup(ways: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, float]:
    plain, drafted = (ways[way] for way in WAYS)
    return {context: round(drafted[context][name] / plain[context][name], 2) for context in plain}


def _show(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    title = f"{result['profile']}: {result['equal_messages']} of {result['messages']} messages equal"
    grid = Grid("context", "way", "tokens/s alone", f"{result['sessions']} at once", "accepted", title=title)
    for context in result["speedup_alone"]:
        for way in WAYS:
            row = result["ways"][way][context]
            cells = (row["tokens_per_second_alone"], row["tokens_per_second_together"])
            grid.add_row(context, way, *map(str, cells), str(row.get("accept_length", "")))
    Console().print(grid)


if __name__ == "__main__":
    sys.exit(main())
