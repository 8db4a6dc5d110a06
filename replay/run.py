"""A replay: sessions, an endpoint and a pace, and the records that come of them."""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import orjson

from replay.client import ChatClient
from replay.errors import EndpointError, RequestFailed
from replay.filler import Filler, cache_bust
from replay.layout import ASSISTANT, USER, Message, PlannedRequest, Planner
from replay.record import Record
from replay.rules import Rules
from replay.schedule import Clock, IdleCapClock, Pace, SessionSchedule, Start
from replay.trace import Session

MOST_FAILURES_IN_A_ROW = 20


@dataclass(slots=True)
class Replay:
    """Keeps `concurrency` session trees live until all sessions have run; records as they come.

    The text depends on `seed`, the sessions' names and the words alone. With `starts`, in seconds from the
    begin, sessions start then, however many are live (open loop). `bust_tokens` is what `rules.cache_bust`'s
    mark costs. With `live` a session goes on from what the endpoint answered, as long as that likes up to the
    recorded length.
    """

    client: ChatClient
    planner: Planner
    words: tuple[str, ...]
    pace: Pace
    clock: Clock
    concurrency: int
    seed: int
    on_record: Callable[[Record], None]
    rules: Rules = field(default_factory=Rules)
    starts: Sequence[float] | None = None
    bust_tokens: int = 0
    live: bool = False
    records: list[Record] = field(default_factory=list[Record])
    warm_up_records: list[Record] = field(default_factory=list[Record])
    begin_s: float | None = None
    end_s: float | None = None
    _begun: asyncio.Event = field(default_factory=asyncio.Event)
    _ready: int = 0
    _lanes: int = 0
    _runs: "itertools.count[int]" = field(default_factory=itertools.count)
    _failures_in_a_row: int = 0

    async def run(self, sessions: Sequence[Session]) -> None:
        """Run the sessions in their order. Raises EndpointError when 20 requests in a row failed."""
        assert self.concurrency >= 1, self.concurrency
        lanes = asyncio.ensure_future(self._run_lanes(sessions))
        try:
            begun = asyncio.ensure_future(self._begun.wait())
            await asyncio.wait({lanes, begun}, return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            _, unfinished = await asyncio.wait({lanes}, timeout=self.rules.duration_s)
            if not unfinished:
                lanes.result()
        finally:
            self.end_s = self.clock.now()
            if not lanes.done():
                lanes.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await lanes

    async def _run_lanes(self, sessions: Sequence[Session]) -> None:
        waiting = itertools.cycle(sessions) if self.rules.recycle else iter(sessions)
        try:
            async with asyncio.TaskGroup() as group:
                if self.starts is not None:
                    self._begin()
                    for session, start_s in zip(sessions, self.starts, strict=True):
                        group.create_task(self._arrive(session, start_s))
                    return
                self._lanes = self.concurrency if self.rules.recycle else min(self.concurrency, len(sessions))
                if not self.rules.has_warm_up:
                    self._begin()
                source = random.Random(self.seed)
                for _ in range(self._lanes):
                    group.create_task(self._lane(waiting, source))
        except ExceptionGroup as group:
            endpoint_errors, others = group.split(EndpointError)
            if endpoint_errors is None or others is not None:
                raise
            error: BaseException = endpoint_errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    def _begin(self) -> None:
        if self.begin_s is None:
            self.begin_s = self.clock.now()
            self._begun.set()

    async def _warm(self) -> None:
        """One lane is warm; returns when all are."""
        self._ready += 1
        if self._ready >= self._lanes:
            self._begin()
        await self._begun.wait()

    async def _arrive(self, session: Session, start_s: float) -> None:
        assert self.begin_s is not None
        await self.clock.sleep_until(self.begin_s + start_s)
        await self._run_session(session, Start())

    async def _lane(self, waiting: Iterator[Session], source: random.Random) -> None:
        start = Start()
        session = next(waiting)
        if self.rules.has_warm_up:
            start = self._start(session, source)
        await self._run_session(session, start)
        for session in waiting:
            await self._run_session(session, Start())

    def _start(self, session: Session, source: random.Random) -> Start:
        low, high = self.rules.start_window or (0.0, 0.0)
        requests = len(session.agents[0].requests)
        first = min(int(source.uniform(low, high) * requests), max(0, requests - 1))
        gap_share = source.random() if first else 1.0
        return Start(first, self.rules.warm_up_requests, gap_share, self._warm)

    async def _run_session(self, session: Session, start: Start) -> None:
        sender = _SessionSender(
            self, session, self.planner.plan(session), self._filler(session), f"{next(self._runs)}"
        )
        await SessionSchedule(session, self.pace, self.clock, sender, start).run()

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
    run: str
    run_id: uuid.UUID = field(default_factory=uuid.uuid4)
    fragments: dict[Message, bytes] = field(default_factory=dict[Message, bytes])
    answers: dict[int, str] = field(default_factory=dict[int, str])

    def prepare(self, agent: int, number: int) -> None:
        """Make the text of the request's new messages."""
        users = 0
        for message in self.planned[agent][number].messages:
            users += message.role == USER
            if message not in self.fragments:
                answer = self.answers.pop(agent, "") if message.role == ASSISTANT else ""
                text = answer or self.filler.text(message)
                if self.replay.rules.cache_bust and message.role == USER and users == 1:
                    text = self._marked(text)
                self.fragments[message] = orjson.dumps({"role": message.role, "content": text})

    def _marked(self, text: str) -> str:
        """The text with the run's mark before it, and as many words less as the mark has tokens."""
        words = text.split()
        kept = words[min(self.replay.bust_tokens, len(words) - 1) :]
        return cache_bust(f"{self.replay.seed}/{self.session.name}/{self.run}") + "".join(
            f" {word}" for word in kept
        )

    async def warm_up(self, agent: int, number: int) -> None:
        """Send the request for one token; its record is kept aside."""
        planned = dataclasses.replace(self.planned[agent][number], output_tokens=1)
        self.replay.warm_up_records.append(await self._send(agent, number, planned, self.replay.clock.now()))

    async def send(self, agent: int, number: int, due_s: float) -> None:
        """Send the request and keep its record."""
        record = await self._send(agent, number, self.planned[agent][number], due_s)
        if self.replay.live and record.answer is not None:
            self.answers[agent] = record.answer.text
        self.replay.add(record)

    async def _send(self, agent: int, number: int, planned: PlannedRequest, due_s: float) -> Record:
        replay, name = self.replay, self.session.agents[agent].name
        body = replay.client.body(
            [self.fragments[message] for message in planned.messages],
            planned.output_tokens,
            forced=not replay.live,
        )
        sent_s = replay.clock.now()
        answer, failure, detail = None, None, ""
        clock = replay.clock
        with clock.request() if isinstance(clock, IdleCapClock) else contextlib.nullcontext():
            try:
                answer = await replay.client.stream(body, str(uuid.uuid5(self.run_id, f"{agent}/{name}")))
            except RequestFailed as error:
                failure, detail = error.reason, error.detail
        return Record(self.session.name, name, number, planned, due_s, sent_s, answer, failure, detail)
