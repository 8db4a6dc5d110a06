"""The other side of a target's sessions: users' requests and tools' results, in worker processes.

A session begins as the script plays it; from some point on the target writes the assistant's messages itself
and its calls are executed on the session's own environment, right or wrong.
"""

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from random import Random
from typing import Any, NamedTuple

from model.encoding import EncodingError, generation_segments, messages_segments
from model.tasks.lexicon import Split
from model.tasks.session import Session
from model.tokenizer import K3Tokenizer
from model.training.documents import Document, Encoder, Kind
from speculative import messages


class Request(NamedTuple):
    """A session to begin: the seed's text, the split, and how many tokens the script plays at least."""

    seed: str
    split: Split
    scripted: int


class Player:
    """One session's user and tools."""

    def __init__(self, request: Request, tokenizer: K3Tokenizer, encoder: Encoder) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        rng = Random(request.seed)
        self._session = Session.draw(rng, request.split)
        document = Document(encoder)
        document.add_head(self._session.environment.schema(), None)
        script = self._session.messages()
        while len(document.ids) < request.scripted:
            document.add_messages(next(script))
        self.prompt = [*document.ids, *self._ask()]
        """Ids of all that stands before the first message of the target."""

    def answer(self, ids: Sequence[int]) -> list[int]:
        """What follows the target's message: results of its calls, or the next request. Up to its turn."""
        session = self._session
        calls = messages.read(self._tokenizer, ids, session.calls).calls
        if not calls:
            return self._ask()
        session.calls += len(calls)
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": session.environment.call(
                    call["function"]["name"], call["function"]["arguments"]
                ).text,
            }
            for call in calls
        ]
        try:
            return self._encode(results, calls)
        except EncodingError:  # no call that the format can answer
            return self._ask()

    def _ask(self) -> list[int]:
        task = self._session.next_task()
        # A secret stands in the script's reasoning alone, which the target did not write.
        self._session.keep(None if task.fact is None or task.fact.is_secret else task.fact)
        return self._encode([{"role": "user", "content": task.prompt}])

    def _encode(self, sent: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]] = ()) -> list[int]:
        document = Document(self._encoder)
        segments = [*messages_segments(sent, calls=calls), *generation_segments()]
        document.add(segments, [Kind.CONTEXT] * len(segments))
        return document.ids


def _work(tokenizer_json: str, pipe: Connection) -> None:
    tokenizer = K3Tokenizer.from_json(tokenizer_json)
    encoder = Encoder(tokenizer)
    players: dict[int, Player] = {}
    while True:
        try:
            wanted: dict[int, Request] | dict[int, list[int]] = pipe.recv()
        except EOFError:
            return
        found: dict[int, list[int]] = {}
        for slot, what in wanted.items():
            if isinstance(what, Request):
                players[slot] = Player(what, tokenizer, encoder)
                found[slot] = players[slot].prompt
            else:
                found[slot] = players[slot].answer(what)
        pipe.send(found)


class Players:
    """Many players, spread over `workers` processes."""

    def __init__(self, tokenizer_json: str, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for _ in range(workers):
            own, other = context.Pipe()
            process = context.Process(target=_work, args=(tokenizer_json, other), daemon=True)
            process.start()
            other.close()
            self._pipes.append(own)
            self._processes.append(process)

    def begin(self, requests: Sequence[Request]) -> list[list[int]]:
        """Begin sessions in slots 0, 1, ...; the prompts."""
        found = self._ask(dict(enumerate(requests)))
        return [found[slot] for slot in range(len(requests))]

    def answer(self, written: dict[int, list[int]]) -> dict[int, list[int]]:
        """What follows the messages that the target wrote, by slot."""
        return self._ask(written)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.terminate()

    def _ask(self, wanted: dict[int, Any]) -> dict[int, list[int]]:
        busy: list[Connection] = []
        for n, pipe in enumerate(self._pipes):
            if part := {slot: what for slot, what in wanted.items() if slot % len(self._pipes) == n}:
                pipe.send(part)
                busy.append(pipe)
        found: dict[int, list[int]] = {}
        for pipe in busy:
            found |= pipe.recv()
        return found
