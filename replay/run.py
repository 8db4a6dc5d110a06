"""A replay: sessions, an endpoint and a pace, and the records that come of them."""

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import orjson

from replay.client import ChatClient
from replay.errors import EndpointError, RequestFailed
from replay.filler import Filler
from replay.layout import Message, PlannedRequest, Planner
from replay.record import Record
from replay.schedule import Clock, Pace, SessionSchedule
from replay.trace import Session

MOST_FAILURES_IN_A_ROW = 20


@dataclass(slots=True)
class Replay:
    """Keeps `concurrency` session trees live until all sessions have run; records as they come.

    The text depends on `seed`, the sessions' names and the words alone. Each time a session of a name runs
    it gets text of its own, so that nothing is shared that the trace does not say.
    """

    client: ChatClient
    planner: Planner
    words: tuple[str, ...]
    pace: Pace
    clock: Clock
    concurrency: int
    seed: int
    on_record: Callable[[Record], None]
    records: list[Record] = field(default_factory=list[Record])
    _failures_in_a_row: int = 0

    async def run(self, sessions: Sequence[Session]) -> None:
        """Run the sessions in their order. Raises EndpointError when 20 requests in a row failed."""
        assert self.concurrency >= 1, self.concurrency
        waiting = iter(sessions)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.concurrency, len(sessions))):
                    group.create_task(self._lane(waiting))
        except ExceptionGroup as group:
            endpoint_errors, others = group.split(EndpointError)
            if endpoint_errors is None or others is not None:
                raise
            error: BaseException = endpoint_errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    async def _lane(self, waiting: Iterator[Session]) -> None:
        for session in waiting:
            sender = _SessionSender(self, session, self.planner.plan(session), self._filler(session))
            await SessionSchedule(session, self.pace, self.clock, sender).run()

    def _filler(self, session: Session) -> Filler:
        scope = "" if session.shared_blocks else session.name
        key = hashlib.blake2b(f"{self.seed}/{scope}".encode(), digest_size=32).digest()
        return Filler(self.words, self.planner.scale, session.block_tokens, key)

    def add(self, record: Record) -> None:
        """Keep a record. Raises EndpointError when too many failed in a row."""
        self.records.append(record)
        self.on_record(record)
        self._failures_in_a_row = 0 if record.failure is None else self._failures_in_a_row + 1
        if self._failures_in_a_row >= MOST_FAILURES_IN_A_ROW:
            raise EndpointError(
                f"{MOST_FAILURES_IN_A_ROW} requests in a row failed, the last with {record.failure!r}"
                + (f": {record.detail}" if record.detail else "")
            )


@dataclass(slots=True)
class _SessionSender:
    """Sends the requests of one session; holds the text of its messages, each made once."""

    replay: Replay
    session: Session
    planned: list[list[PlannedRequest]]
    filler: Filler
    run_id: uuid.UUID = field(default_factory=uuid.uuid4)
    fragments: dict[Message, bytes] = field(default_factory=dict[Message, bytes])

    def prepare(self, agent: int, number: int) -> None:
        """Make the text of the request's new messages."""
        for message in self.planned[agent][number].messages:
            if message not in self.fragments:
                content = {"role": message.role, "content": self.filler.text(message)}
                self.fragments[message] = orjson.dumps(content)

    async def send(self, agent: int, number: int, due_s: float) -> None:
        """Send the request and keep its record."""
        replay, planned = self.replay, self.planned[agent][number]
        name = self.session.agents[agent].name
        body = replay.client.body(
            [self.fragments[message] for message in planned.messages], planned.output_tokens
        )
        sent_s = replay.clock.now()
        answer, failure, detail = None, None, ""
        try:
            answer = await replay.client.stream(body, str(uuid.uuid5(self.run_id, f"{agent}/{name}")))
        except RequestFailed as error:
            failure, detail = error.reason, error.detail
        replay.add(Record(self.session.name, name, number, planned, due_s, sent_s, answer, failure, detail))
