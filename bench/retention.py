"""What a long session takes in the store: bytes of pages and states, as the retention code leaves them.

Plays one session turn by turn at Kimi K3's geometry with the store's own policy, no server needed. A turn
adds pages for its new tokens, and states as SGLang 0.5.23 stores them: one at the end of the prompt, one for
each prefill chunk before it, and one at the end of the answer, each on its grid. Compared are the least that
lets the session go on (its pages and its last state) and SGLang's file backend, which keeps everything.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cache_store.options import StoreOptions
from cache_store.retention import Chain, Reason, StatePolicy

PAGE_TOKENS = 64
_DEFAULTS = StoreOptions.model_fields


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a model's cache is made of; the defaults are Kimi K3's, in bfloat16 with states in float32.

    Attributes:
        mla_layers: layers that keep `latent` numbers a token.
        kda_layers: layers that keep a state of `heads` x `head_dim` x `head_dim`, and the last `conv_inputs`
            inputs of the convolutions over queries, keys and values.
    """

    mla_layers: int = 24
    latent: int = 512 + 64
    kda_layers: int = 69
    heads: int = 96
    head_dim: int = 128
    conv_inputs: int = 3
    kv_item_bytes: int = 2
    state_item_bytes: int = 4
    conv_item_bytes: int = 2

    def __post_init__(self) -> None:
        assert min(asdict(self).values()) > 0, self

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Geometry":
        """Read a checkpoint's configuration.

        Raises:
            ValueError: it is not Kimi K3's kind.
        """
        try:
            text = config.get("text_config", config)
            linear = text["linear_attn_config"]
            return cls(
                mla_layers=len(linear["full_attn_layers"]),
                latent=text["kv_lora_rank"] + text["qk_rope_head_dim"],
                kda_layers=len(linear["kda_layers"]),
                heads=linear["num_heads"],
                head_dim=linear["head_dim"],
                conv_inputs=linear["short_conv_kernel_size"] - 1,
            )
        except KeyError as error:
            raise ValueError(f"the configuration has no {error}: it is not a Kimi K3's") from None

    @property
    def token_bytes(self) -> int:
        """Of KV, for each token."""
        return self.mla_layers * self.latent * self.kv_item_bytes

    @property
    def state_bytes(self) -> int:
        """Of one state."""
        channels = 3 * self.heads * self.head_dim
        per_layer = self.heads * self.head_dim**2 * self.state_item_bytes
        return self.kda_layers * (per_layer + channels * self.conv_inputs * self.conv_item_bytes)


@dataclass(frozen=True, slots=True)
class Session:
    """A session whose context grows by the same number of tokens every turn.

    Attributes:
        turns: how many.
        context_tokens: after the last one.
        answer_tokens: of each turn, within what it adds.
        turn_s: from one turn to the next.
    """

    turns: int = 65
    context_tokens: int = 142_000
    answer_tokens: int = 444
    turn_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.answer_tokens < self.context_tokens / max(self.turns, 1):
            raise ValueError(
                "a turn must add more tokens than its answer has: check turns, context and answer"
            )

    def states(self, turn: int, *, chunk_tokens: int, track_tokens: int) -> list[int]:
        """Positions (in pages) of the states that SGLang stores in a turn, 0 the first."""
        before = self.context_tokens * turn // self.turns
        after = self.context_tokens * (turn + 1) // self.turns
        prompt = after - self.answer_tokens
        cached = before // track_tokens * track_tokens
        ends = [*range(cached + chunk_tokens, prompt, chunk_tokens), prompt]
        tokens = [end // PAGE_TOKENS * PAGE_TOKENS for end in ends] + [after // track_tokens * track_tokens]
        return sorted({end // PAGE_TOKENS for end in tokens if end > cached})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Bytes in the store, of pages and states.

    Attributes:
        stored_bytes: when the session rests and what was superseded has expired.
        peak_bytes: at most, right after a turn, with what is superseded and has not expired yet.
        tail_only_bytes: of its pages and its last state.
        file_backend_bytes: of its pages and all states.
        kept: why each state stays, by its position in tokens.
        states_written: how many there were.
    """

    stored_bytes: int
    peak_bytes: int
    tail_only_bytes: int
    file_backend_bytes: int
    kept: dict[int, Reason]
    states_written: int

    @property
    def ratio(self) -> float:
        """Stored bytes over the least."""
        return self.stored_bytes / self.tail_only_bytes


def play(
    session: Session,
    policy: StatePolicy,
    geometry: Geometry,
    *,
    superseded_ttl_s: float,
    chunk_tokens: int,
    track_tokens: int,
) -> Outcome:
    """Store a session as its turns come."""
    states: list[int] = []
    expiring: list[float] = []
    kept: dict[int, Reason] = {}
    written = peak = 0
    for turn in range(session.turns):
        now = turn * session.turn_s
        for position in session.states(turn, chunk_tokens=chunk_tokens, track_tokens=track_tokens):
            if states and position <= states[-1]:
                continue
            written += 1
            kept = policy.kept(Chain([*states, position]))
            expiring += [now + superseded_ttl_s] * (len(states) + 1 - len(kept))
            states = sorted(kept)
        expiring = [date for date in expiring if date > now]
        pages = session.context_tokens * (turn + 1) // session.turns // PAGE_TOKENS
        held = len(states) + len(expiring)
        peak = max(peak, pages * PAGE_TOKENS * geometry.token_bytes + held * geometry.state_bytes)
    kv_bytes = session.context_tokens // PAGE_TOKENS * PAGE_TOKENS * geometry.token_bytes
    return Outcome(
        stored_bytes=kv_bytes + len(states) * geometry.state_bytes,
        peak_bytes=peak,
        tail_only_bytes=kv_bytes + geometry.state_bytes,
        file_backend_bytes=kv_bytes + written * geometry.state_bytes,
        kept={position * PAGE_TOKENS: reason for position, reason in sorted(kept.items())},
        states_written=written,
    )


def main() -> int:
    """Compute and report; 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="python -m bench.retention", description=__doc__)
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="a checkpoint's config.json (default: Kimi K3's numbers)")
    add("--turns", type=int, default=65, help="of the session (default: %(default)s)")
    add("--context", type=int, default=142_000, metavar="TOKENS", help="in the end (default: %(default)s)")
    add("--answer", type=int, default=444, metavar="TOKENS", help="of each turn (default: %(default)s)")
    add("--turn-seconds", type=float, default=30.0, metavar="S", help="between turns (default: %(default)s)")
    add("--keep-every", type=int, default=_DEFAULTS["state_keep_every"].default, metavar="TOKENS")
    add("--superseded-ttl", type=float, default=_DEFAULTS["superseded_ttl_s"].default, metavar="S")
    add("--state-dtype", choices=("exact", "bfloat16"), default="exact", help="as stored (default: exact)")
    add("--chunk", type=int, default=8192, metavar="TOKENS", help="of prefill (default: %(default)s)")
    add(
        "--track",
        type=int,
        default=256,
        metavar="TOKENS",
        help="grid of decode states (default: %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    try:
        geometry = Geometry.of(json.loads(args.config.read_text())) if args.config else Geometry()
        session = Session(args.turns, args.context, args.answer, args.turn_seconds)
    except (OSError, ValueError) as error:
        print(f"bench.retention: {error}", file=sys.stderr)
        return 2
    stored = geometry
    if args.state_dtype == "bfloat16":
        stored = Geometry(**(asdict(geometry) | {"state_item_bytes": 2}))
    settings = {
        "superseded_ttl_s": args.superseded_ttl,
        "chunk_tokens": args.chunk,
        "track_tokens": args.track,
    }
    policy = StatePolicy(args.keep_every, PAGE_TOKENS)
    outcome = play(session, policy, stored, **settings)
    # What another backend keeps is not narrowed.
    file_bytes = play(session, policy, geometry, **settings).file_backend_bytes
    report = {
        "stored_bytes": outcome.stored_bytes,
        "tail_only_bytes": outcome.tail_only_bytes,
        "ratio": round(outcome.ratio, 3),
        "peak_bytes": outcome.peak_bytes,
        "file_backend_bytes": file_bytes,
        "states_written": outcome.states_written,
        "states_kept": {str(tokens): reason for tokens, reason in outcome.kept.items()},
        "token_bytes": stored.token_bytes,
        "state_bytes": stored.state_bytes,
        "session": asdict(session),
    }
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "bytes", "over the tail alone")
    least = report["tail_only_bytes"]
    for name in ("tail_only_bytes", "stored_bytes", "peak_bytes", "file_backend_bytes"):
        table.add_row(
            name.removesuffix("_bytes").replace("_", " "), f"{report[name]:,}", f"{report[name] / least:.2f}"
        )
    console = Console()
    console.print(table)
    kept = ", ".join(f"{int(tokens):,} ({reason})" for tokens, reason in report["states_kept"].items())
    console.print(f"{report['states_written']} states written; kept, by tokens: {kept}")


if __name__ == "__main__":
    sys.exit(main())
