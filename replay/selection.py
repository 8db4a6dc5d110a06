"""Which sessions are replayed, and how small."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from replay.errors import ReplayError
from replay.formats import read_sessions
from replay.scale import Scale
from replay.trace import Session


def load(
    paths: Sequence[Path], most_sessions: int | None = None, most_turns: int | None = None
) -> list[Session]:
    """The first sessions of files and folders, each with its first turns; their names made unique.

    Raises TraceError.
    """
    seen: Counter[str] = Counter()
    sessions: list[Session] = []
    for session in itertools.islice(read_sessions(paths), most_sessions):
        seen[session.name] += 1
        if seen[session.name] > 1:
            session = dataclasses.replace(session, name=f"{session.name}#{seen[session.name]}")
        sessions.append(session if most_turns is None else session.first_turns(most_turns))
    return sessions


def context_tokens(session: Session, scale: Scale) -> int:
    """The largest prompt and output of a request of the session, scaled."""
    return max(
        scale.length(request.input_tokens) + scale.length(request.output_tokens)
        for agent in session.agents
        for request in agent.requests
    )


def largest_scale(sessions: Sequence[Session], context: int | None) -> Scale:
    """The largest of 1, 1/2, 1/4, ... at which every request fits a context, 1 when that is unknown."""
    scale = Scale()
    while context is not None and any(context_tokens(session, scale) > context for session in sessions):
        if scale.length(2**62) == 1:
            raise ReplayError(f"no scale makes the requests fit a context of {context} tokens")
        scale = Scale(scale.factor / 2)
    return scale


def fitting(sessions: Sequence[Session], scale: Scale, most: int | None) -> tuple[list[Session], list[str]]:
    """The sessions of which no request has more than `most` tokens, and the names of the others.

    Raises ReplayError when none fits.
    """
    fits = [most is None or context_tokens(session, scale) <= most for session in sessions]
    if not any(fits):
        raise ReplayError(f"no session fits {most} tokens at scale {scale}")
    return (
        [session for session, fit in zip(sessions, fits, strict=True) if fit],
        [session.name for session, fit in zip(sessions, fits, strict=True) if not fit],
    )
