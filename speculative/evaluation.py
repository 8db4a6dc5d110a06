"""How good a draft is: accept lengths as served and as the trainer's walk over the same text has them.

An engine with the draft plays held-out agent sessions greedily, behind contexts of several lengths, and says
how often it verified a block. Then target and draft, as the trainer has them, walk over what it wrote.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model.tasks.lexicon import Split
from speculative import distribution, messages, plots
from speculative.acceptance import Tally, measure
from speculative.pair import Pair
from speculative.players import Request
from speculative.served import Engine, Played, play, running


@dataclass(frozen=True, slots=True)
class Stretch:
    """Sessions behind a context: its tokens (those of the script and the first request are at least so many),
    the number of sessions, and how many messages are played of each."""

    context: int
    sessions: int
    messages: int


STRETCHES: Final = (Stretch(1024, 6, 6), Stretch(8192, 2, 10), Stretch(24576, 1, 16))
_LONGEST: Final = 32000


def evaluate(
    target: Path,
    draft: Path,
    note: Callable[[str], None],
    *,
    seed: int,
    stretches: Sequence[Stretch] = STRETCHES,
) -> dict[str, Any]:
    """Play, measure and compare; fields as documented in `speculative/README.md`. Raises `DraftError`."""
    began = time.monotonic()
    pair = Pair.load(target, draft)
    with running(target, draft) as engine:
        note(f"the engine stands after {time.monotonic() - began:.0f} s")
        played = {
            stretch.context: play_stretch(engine, pair, stretch, f"draft/{seed}", note)
            for stretch in stretches
        }
        first_tokens = distribution.sample(engine, pair, note)
    whole = Tally()
    contexts: dict[str, Any] = {}
    greedy = written = 0
    for context, sessions in played.items():
        tally = Tally()
        for session in sessions:
            segments = messages.segments(pair.tokenizer, session.ids, session.written)
            measured = measure(pair.draft, pair.target, session.ids, session.written)
            for found in measured.rounds:
                for counted in (tally, whole):
                    counted.add(found, segments[found.at + 1])
            greedy += int(measured.is_greedy.sum())
            written += len(measured.is_greedy)
        drafted = sum(session.drafted for session in sessions)
        rounds = sum(session.rounds for session in sessions)
        contexts[str(context)] = {
            "accept_length_served": round(drafted / max(1, rounds), 3),
            "rounds_served": rounds,
            **tally.to_json(),
        }
        note(f"context {context}: {tally.length:.3f} walked, {drafted / max(1, rounds):.3f} served")
    drafted = sum(session.drafted for sessions in played.values() for session in sessions)
    rounds = sum(session.rounds for sessions in played.values() for session in sessions)
    served = drafted / max(1, rounds)
    result: dict[str, Any] = {
        "accept_length_rollout": round(whole.length, 3),
        "accept_length_served": round(served, 3),
        "served_over_rollout": round(served / whole.length, 3),
        **{
            f"accept_length_{context // 1024}k": contexts[str(context)]["accept_length"] for context in played
        },
        "target_tokens": round(greedy / max(1, written), 5),
        "written_tokens": written,
        "survival": whole.to_json()["survival"],
        "by_segment": whole.to_json()["by_segment"],
        "contexts": contexts,
        "first_tokens": first_tokens,
        "seconds": round(time.monotonic() - began, 1),
    }
    if "accept_length_24k" in result and "accept_length_1k" in result:
        result["ratio_24k_1k"] = round(result["accept_length_24k"] / result["accept_length_1k"], 3)
    return result


def play_stretch(
    engine: Engine, pair: Pair, stretch: Stretch, seed: str, note: Callable[[str], None]
) -> list[Played]:
    """Play sessions at once; behind every context the same ones, tools and all."""
    began = time.monotonic()
    requests = [
        Request(f"{seed}/{number}", Split.HELD_OUT, stretch.context) for number in range(stretch.sessions)
    ]

    def one(request: Request) -> Played:
        return play(engine, pair.tokenizer, request, stretch.messages, _LONGEST)

    with ThreadPoolExecutor(stretch.sessions) as pool:
        found = list(pool.map(one, requests))
    note(f"context {stretch.context}: played in {time.monotonic() - began:.0f} s")
    return found


def plot(result: dict[str, Any]) -> str:
    """SVG: the share of rounds that accept at least so many tokens, by context."""
    curves = {
        f"{int(context):,} tokens": [(k, share) for k, share in enumerate(found["survival"], 1)]
        for context, found in result["contexts"].items()
    }
    return plots.lines(
        "Share of rounds that accept at least k proposed tokens", ("k", "tokens of context"), curves
    )


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the figures and the plot to a directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (path / "survival.svg").write_text(plot(result), encoding="utf-8")


def show(result: dict[str, Any]) -> None:
    """Print tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        "context", "walked", "served", *(f"\u2265 {k}" for k in range(1, len(result["survival"]) + 1))
    )
    table.title = "accept length, and the share of rounds that accept at least k tokens"
    for context, found in result["contexts"].items():
        shares = (f"{share:.2f}" for share in found["survival"])
        table.add_row(
            f"{int(context):,}", str(found["accept_length"]), str(found["accept_length_served"]), *shares
        )
    shares = (f"{share:.2f}" for share in result["survival"])
    table.add_row("all", str(result["accept_length_rollout"]), str(result["accept_length_served"]), *shares)
    console.print(table)
    table = Table("written", "accept length", "rounds", title="by what a round's first token belongs to")
    for segment, found in result["by_segment"].items():
        table.add_row(segment, str(found["accept_length"]), str(found["rounds"]))
    console.print(table)
    first = result["first_tokens"]
    console.print(
        f"temperature 1: {first['samples']} first drafted tokens against the target's distribution: "
        f"chi-square {first['chi_square']}, {first['degrees']} degrees, p = {first['p_value']}"
    )
