"""The options of a replay's rules, and how options are read."""

import argparse
import itertools
import random
from collections.abc import Sequence
from fractions import Fraction

from replay.rules import SCENARIOS, Rules, chosen
from replay.trace import Session


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the rules and of arrivals."""
    group = parser.add_argument_group("rules", "a scenario sets them; each can be set for itself")
    add = group.add_argument
    add("--scenario", choices=sorted(SCENARIOS), default="none", help="agentx: those of InferenceX")
    add(
        "--start-window",
        type=window,
        metavar="LOW-HIGH",
        help="begin live sessions at a random place between these shares (agentx: 0.25-0.75)",
    )
    add(
        "--warm-up",
        type=count,
        metavar="N",
        help="requests for one token before that place, per session (agentx: 10)",
    )
    add("--duration", type=over_zero, metavar="SECONDS", help="measured time (agentx: 3600)")
    add(
        "--system-idle-cap",
        type=not_negative,
        metavar="SECONDS",
        help="longest time without any request in flight (agentx: 10)",
    )
    switch = argparse.BooleanOptionalAction
    add("--recycle", action=switch, help="begin ended sessions again (agentx: yes)")
    add("--cache-bust", action=switch, help="mark each run of a session in its first user message")
    add(
        "--count-template",
        action=switch,
        help="count what the chat template adds among the trace's tokens (agentx: no)",
    )
    add(
        "--cut-tails",
        action=switch,
        help="cut a session's last message at its last full block when it goes on (agentx: yes)",
    )
    add("--overflow-limit", type=not_negative, metavar="SHARE", help="of prompts too long (agentx: 0.01)")
    add(
        "--arrivals",
        choices=("closed", "poisson", "trace"),
        default="closed",
        help="closed: --concurrency live sessions; else sessions start at random, --rate a second, or when "
        "the trace says, times --time-scale, however many are live (default: %(default)s)",
    )
    add(
        "--live",
        action="store_true",
        help="let the endpoint's answers go into the next turns, without their reasoning, as clients do; "
        "token counts and prefixes then are not those of the trace",
    )
    add("--rate", type=over_zero, metavar="SESSIONS", help="with --arrivals poisson")


def rules(args: argparse.Namespace) -> Rules:
    """The scenario's rules with those of the options."""
    return chosen(
        args.scenario,
        {
            "start_window": args.start_window,
            "warm_up_requests": args.warm_up,
            "duration_s": args.duration,
            "system_idle_cap_s": args.system_idle_cap,
            "recycle": args.recycle,
            "cache_bust": args.cache_bust,
            "count_template": args.count_template,
            "cut_tails": args.cut_tails,
            "overflow_limit": args.overflow_limit,
            "error_limit": args.error_limit,
        },
    )


def starts(
    args: argparse.Namespace, sessions: Sequence[Session], seed: int, time_scale: float
) -> list[float] | None:
    """When sessions start in an open loop, in seconds from the begin; None for a closed one."""
    if args.arrivals == "closed":
        return None
    if args.arrivals == "poisson":
        source = random.Random(seed)
        gaps = (source.expovariate(args.rate) for _ in sessions)
        return list(itertools.accumulate(gaps, initial=0.0))[: len(sessions)]
    first_s = min(session.arrival_s for session in sessions)
    return [(session.arrival_s - first_s) * time_scale for session in sessions]


def positive(text: str) -> int:
    """An integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {number}")
    return number


def not_negative(text: str) -> float:
    """A number or a fraction of at least 0."""
    try:
        number = float(Fraction(text))
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"must be a number or a fraction, is {text!r}") from error
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, is {text}")
    return number


def over_zero(text: str) -> float:
    """A number over 0."""
    number = not_negative(text)
    if not number:
        raise argparse.ArgumentTypeError("must be over 0")
    return number


def count(text: str) -> int:
    """An integer of at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, is {number}")
    return number


def window(text: str) -> tuple[float, float]:
    """Two shares, such as `0.25-0.75`."""
    low, _, high = text.partition("-")
    try:
        window = float(low), float(high)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be two shares such as 0.25-0.75, is {text!r}") from error
    if not 0 <= window[0] <= window[1] <= 1:
        raise argparse.ArgumentTypeError(f"must be two shares from 0 to 1 in order, is {text!r}")
    return window
