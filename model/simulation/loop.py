"""The closed loop: so many live sessions, each followed by another, turns after the recorded gaps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from model.simulation.admission import Admission, Turn
from model.simulation.events import Events
from model.simulation.node import Node, Request
from model.simulation.workload import Call, Conversation, Script


@dataclass(slots=True)
class Loop:
    """Runs scripts over a node until `wanted` requests are measured.

    Lanes begin at random times within `start_window_s`: all at once would be a burst that no cache helps.
    The first session of each lane begins at a random place, at most `start_share` of it in, so that contexts
    are of all lengths at once; its first request counts as warm-up, as do all until `warm_up` have ended.
    Scripts are taken in an order drawn from `seed`, again and again, each time with a tree of its own. With
    `once` each is run once, in the given order and from its beginning, and all requests are measured.
    """

    node: Node
    events: Events
    scripts: Sequence[Script]
    concurrency: int
    wanted: int
    seed: int
    admission: Admission | None = None
    start_share: float = 0.75
    start_window_s: float = 0.0
    warm_up: int = 0
    once: bool = False
    records: list[Request] = field(default_factory=list[Request])
    begin_s: float = 0.0
    _ended: int = 0
    _runs: int = 0
    _order: list[int] = field(default_factory=list[int])

    def run(self) -> None:
        """Run to the end."""
        source = random.Random(self.seed)
        if self.once:
            self._order = list(reversed(range(len(self.scripts))))
            self.start_share = self.start_window_s = 0.0
        for _ in range(min(self.concurrency, len(self.scripts)) if self.once else self.concurrency):
            start = source.random() * self.start_share
            begin_s = source.random() * self.start_window_s
            self.events.at(begin_s, lambda start=start: self._open(source, start))
        self.events.run(lambda: len(self.records) >= self.wanted)

    def _open(self, source: random.Random, start: float) -> None:
        if self.once and not self._order:
            return
        if not self._order:
            self._order = source.sample(range(len(self.scripts)), len(self.scripts))
        script = self.scripts[self._order.pop()]
        self._runs += 1
        _Run(self, script, self._runs, lambda: self._open(source, 0.0)).begin(start)

    def ended(self, request: Request, counts: bool) -> None:
        """Count a request whose answer ended."""
        self._ended += 1
        if self.once or (self._ended > self.warm_up and counts):
            self.records.append(request)
        elif not self.records:
            self.begin_s = self.events.now_s


@dataclass(slots=True)
class _Run:
    """One run of a script. A shared tree has number 0, so that all runs find what others left."""

    loop: Loop
    script: Script
    number: int
    ended: Callable[[], None]
    first: int = 0
    live: int = 0
    done: dict[int, float] = field(default_factory=dict[int, float])
    joins: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])

    def begin(self, start: float) -> None:
        root = self.script.conversations[0]
        self.first = int(start * len(root.calls))
        # Sub-agents that were spawned before are not run, and nobody waits for them.
        for index, child in enumerate(self.script.conversations):
            if index and (child.parent != 0 or (child.after or 0) < self.first) and self.first:
                self.done[index] = self.loop.events.now_s
        self.live = 1
        if not self.first:
            self._spawn(0, None)
        self._next(0, self.first, self.loop.events.now_s)

    def _next(self, index: int, number: int, from_s: float) -> None:
        """Plan call `number` of a conversation, whose call before ended at `from_s`."""
        conversation = self.script.conversations[index]
        if number >= len(conversation.calls):
            self._end(index)
            return
        waits = self._awaited(conversation, index, number)
        if waits:
            self.joins[index] = lambda: self._next(index, number, from_s)
            return
        call = conversation.calls[number]
        gap_s = call.gap_s if number > self.first or index else 0.0
        events = self.loop.events
        events.at(from_s + gap_s, lambda: self._ask(index, number, call))

    def _awaited(self, conversation: Conversation, index: int, number: int) -> bool:
        return any(
            child.parent == index and child.before == number and place not in self.done
            for place, child in enumerate(self.script.conversations)
        )

    def _ask(self, index: int, number: int, call: Call) -> None:
        due_s, loop = self.loop.events.now_s, self.loop

        def submit() -> None:
            run = 0 if self.script.shared else self.number
            request = Request(run, self.script.tree, call, due_s, finished)
            loop.node.submit(request)

        def finished(request: Request) -> None:
            loop.ended(request, counts=bool(index) or number > self.first or not self.first)
            if loop.admission is not None:
                loop.admission.rest(turn, request.first_token_s)
            self._spawn(index, number)
            self._next(index, number + 1, request.end_s)

        tokens = call.input_tokens + call.output_tokens
        turn = Turn(self.number, call.input_tokens, tokens, submit)
        if loop.admission is None:
            submit()
        else:
            loop.admission.ask(turn)

    def _spawn(self, parent: int, after: int | None) -> None:
        for index, child in enumerate(self.script.conversations):
            if index and child.parent == parent and child.after == after and index not in self.done:
                self.live += 1
                start_s = self.loop.events.now_s + child.lead_s
                self._spawn(index, None)
                self._next(index, 0, start_s)

    def _end(self, index: int) -> None:
        self.done[index] = self.loop.events.now_s
        self.live -= 1
        parent = self.script.conversations[index].parent
        if parent is not None and parent in self.joins:
            self.joins.pop(parent)()
        if not self.live:
            self.ended()
