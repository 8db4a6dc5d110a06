"""Keeps what is worth keeping: lives of pages, superseded states, and what each tenant may hold.

Everything is decided from what the server says and from what SGLang says about chains, and done over the same
connections, deadlines and breaker as the values themselves. A fault means only that something lives longer,
or that a byte is counted late. What this process remembers saves round trips and nothing else depends on it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_store import metrics
from cache_store.accounting import Accounts
from cache_store.backlog import Backlog
from cache_store.chain import Span, StoredPool
from cache_store.namespace import key_prefix
from cache_store.options import StoreOptions
from cache_store.retention import TTL_MS, Chain, Lifetimes, Recent, StatePolicy
from cache_store.roots import RECORD_BYTES, UNKNOWN, Root, root_key
from cache_store.shards import Shards

_REMEMBERED = 16_384
_ROOT_FOUND_S = 30.0
_ROOT_MISSING_S = 5.0
_HELD_S = 2.0
# A state is judged when its pages are there too: SGLang writes them after it.
_WAITS_S = (1.0, 4.0, 16.0)
_SUCCESSORS_TTL_MS = b"%d" % (2 * max(TTL_MS.values()))
# States that were shortened are looked for until they are gone, so many of them for each chain.
_CUT_MAX = 16


@dataclass(frozen=True, slots=True)
class _Judged:
    """What is known of a chain up to one of its states.

    Attributes:
        date_ms: to which its states that stay were prolonged.
        states: positions of those that stay.
        cut: positions of those that were shortened and are not gone yet.
    """

    date_ms: int
    states: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()


class Keeper:
    """Retention and accounting of one engine process. Thread-safe.

    `clock` gives seconds since 1970, `timer` monotonic seconds.
    """

    def __init__(
        self,
        values: Shards,
        options: StoreOptions,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._values = values
        self._options = options
        self._clock = clock
        self._timer = timer
        self._accounts = Accounts(values)
        self._pools: dict[str, StoredPool] = {}
        self._pages: StoredPool | None = None
        self._policy: StatePolicy | None = None
        self._roots: Recent[str, tuple[Root, float]] = Recent(_REMEMBERED)
        self._prolonged: Recent[tuple[str, str], int] = Recent(_REMEMBERED)
        self._judged: Recent[tuple[str, str], _Judged] = Recent(_REMEMBERED)
        self._held: Recent[str, tuple[int, float]] = Recent(_REMEMBERED)
        self._backlog = Backlog(lambda error: values.faults.count("internal", error, trace=True), timer=timer)

    def register(self, pool: StoredPool, *, page_tokens: int | None = None) -> None:
        """Take one more pool; `page_tokens` with that of the pages that every chain is made of."""
        self._pools[pool.name] = pool
        if page_tokens is not None:
            self._pages = pool
            self._policy = StatePolicy(self._options.state_keep_every, page_tokens)

    @property
    def waiting(self) -> int:
        """Number of chains that are still to be looked at."""
        return len(self._backlog)

    def lives_ms(self, span: Span) -> list[int]:
        """What each page of a span that is written now has to live."""
        lifetimes, now_ms = self._lifetimes(span), self._now_ms()
        # Where a page lies is not known: the shortest that its class allows.
        positions = span.positions() or [1 << 30] * len(span.keys)
        return [lifetimes.life_ms(now_ms, position) for position in positions]

    def admits(self, pool: StoredPool, span: Span) -> bool:
        """Whether the tenant may store this span; if not, that is counted."""
        root = self._root(span)
        limit = root.max_bytes or (self._options.tenant_max_bytes if root.tenant != UNKNOWN else None)
        if limit is None:
            return True
        held, at = self._held.get(root.tenant) or (0, -_HELD_S)
        if self._timer() - at >= _HELD_S:
            found = self._accounts.held_bytes(list(self._pools.values()), root.tenant, self._now_ms())
            if found is None:
                return True
            held, at = found, self._timer()
        wanted = len(span.keys) * pool.length
        admitted = held + wanted <= limit
        self._held.set(root.tenant, (held + wanted if admitted else held, at))
        if not admitted:
            metrics.REFUSED.labels(pool.name).inc(len(span.keys))
        return admitted

    def read(self, pool: StoredPool, span: Span, done: Sequence[bool]) -> None:
        """A span of pages was read: soon it and all before it live as if it had been written now."""
        if span.prefix is not None and span.keys and all(done):
            self._backlog.add(lambda: self._used(pool, span, len(span.prefix or ()) + len(span.keys)), (0.0,))

    def read_state(self, pool: StoredPool, span: Span, done: Sequence[bool]) -> None:
        """A state was read: soon it has its full life again."""
        if span.prefix is not None and span.keys and all(done):

            def work() -> bool:
                self._values.prolong(pool.values(span.keys), self.lives_ms(span))
                self._account(pool, span)
                return True

            self._backlog.add(work, (0.0,))

    def written(self, pool: StoredPool, span: Span, done: Sequence[bool]) -> None:
        """A span of pages was written: no page before it may expire sooner, and it is counted."""
        if span.prefix is not None and span.keys and all(done):
            self._used(pool, span, len(span.prefix))

    def _used(self, pool: StoredPool, span: Span, older: int) -> bool:
        """Prolong the first `older` pages of the chain that are not yet, and count them and the rest."""
        chain = span.chain
        date_ms = self._lifetimes(span).date_ms(self._now_ms())

        def is_prolonged(length: int) -> bool:
            return (self._prolonged.get((pool.name, chain[length - 1])) or 0) >= date_ms

        if is_prolonged(len(chain)):
            return True
        first = next((length for length in range(older, 0, -1) if is_prolonged(length)), 0)
        before = Span(chain[first:older], chain[:first])
        if not before.keys or self._values.prolong(pool.values(before.keys), self.lives_ms(before)):
            self._prolonged.set((pool.name, chain[-1]), date_ms)
            self._account(pool, Span(chain[first:], chain[:first]))
        return True

    def arrived(self, pool: StoredPool, span: Span) -> None:
        """The state at the end of `span` was written: soon others of its chain may be superseded."""
        if span.prefix is None or not span.keys:
            return
        self._account(pool, span)
        self._backlog.add(lambda: self._judge(pool, span), _WAITS_S)

    def work(self) -> bool:
        """Look at the chain that is due first; False if none is."""
        return self._backlog.work()

    def close(self) -> None:
        """Stop. What was not done means only that something lives longer."""
        self._backlog.close(self._options.timeout_s + 1.0)

    def _judge(self, pool: StoredPool, span: Span) -> bool:
        """Shorten what the state at the end of `span` supersedes; False if its chain is not whole."""
        assert self._pages is not None and self._policy is not None, "no pages are registered"
        chain = span.chain
        lifetimes, now_ms = self._lifetimes(span), self._now_ms()
        date_ms = lifetimes.date_ms(now_ms)
        known_to, known = self._last_judged(pool, chain[:-1], date_ms)
        # All but its last two stay for good, and are not asked about again before the next date.
        start = known.states[-2] if len(known.states) > 1 else 0
        found = self._look(pool, chain, max(start, 1), max(known_to, 1), known.cut)
        if found is None:
            return False
        states, forks, gone = found
        settled = [position for position in known.states if position < start]
        judged = Chain([*settled, *states], forks)
        superseded = [position for position in self._policy.superseded(judged) if position >= max(start, 1)]
        kept = [position for position in judged.states if position not in superseded]
        if superseded:
            self._supersede(pool, span, [chain[position - 1] for position in superseded])
        if start == 0:
            staying = [Span([chain[position - 1]], chain[: position - 1]) for position in kept]
            lives = [lifetimes.life_ms(now_ms, position) for position in kept]
            self._values.prolong(pool.values([one.keys[0] for one in staying]), lives)
            for one in staying:
                self._account(pool, one)
        metrics.STATES.labels("expired").inc(len(gone))
        cut = [position for position in [*known.cut, *superseded] if position not in gone]
        self._judged.set((pool.name, chain[-1]), _Judged(date_ms, tuple(kept), tuple(cut[-_CUT_MAX:])))
        return True

    def _last_judged(self, pool: StoredPool, chain: Sequence[str], date_ms: int) -> tuple[int, _Judged]:
        """The deepest state of the chain that was judged at this date, and what is known up to it."""
        for position in range(len(chain), 0, -1):
            judged = self._judged.get((pool.name, chain[position - 1]))
            if judged is not None and judged.date_ms == date_ms:
                return position, judged
        return 0, _Judged(date_ms)

    def _look(
        self, pool: StoredPool, chain: Sequence[str], start: int, unmarked: int, cut: Sequence[int]
    ) -> tuple[list[int], set[int], set[int]] | None:
        """The states from position `start` on, the pages after which chains part, the gone of `cut`.

        None after a fault, or if a page or the last state is missing. One round trip. Every page's successor
        is added to a set of its own, those of the pages from `unmarked` on now: two members, two chains.
        """
        assert self._pages is not None, "no pages are registered"
        there = [(b"STRLEN", key) for key in pool.keys([chain[position - 1] for position in cut])]
        pages, states = self._pages.keys(chain[start - 1 :]), pool.keys(chain[start - 1 :])
        commands: list[tuple[bytes, ...]] = [*there]
        for position in range(start, len(chain) + 1):
            commands += [(b"STRLEN", pages[position - start]), (b"STRLEN", states[position - start])]
        counted = len(commands)
        for position in range(start, len(chain)):
            key = key_prefix(pool.space) + b"next:" + chain[position - 1].encode()
            if position >= unmarked:
                # The hash's first 6 bytes: sets of small integers are stored in a few bytes.
                commands += [(b"SADD", key, b"%d" % int(chain[position][:12], 16))]
                commands += [(b"PEXPIRE", key, _SUCCESSORS_TTL_MS)]
            commands += [(b"SCARD", key)]
        replies = self._values.integers(commands)
        if replies is None:
            return None
        lengths = replies[len(cut) : counted]
        found = [
            position for position, length in enumerate(lengths[1::2], start) if length == pool.record_bytes
        ]
        whole = all(length == self._pages.record_bytes for length in lengths[::2])
        if not whole or not found or found[-1] != len(chain):
            return None
        cards = [
            reply
            for (verb, *_), reply in zip(commands[counted:], replies[counted:], strict=True)
            if verb == b"SCARD"
        ]
        forks = {position for position, card in enumerate(cards, start) if card > 1}
        return found, forks, {position for position, length in zip(cut, replies, strict=False) if length == 0}

    def _supersede(self, pool: StoredPool, span: Span, pages: Sequence[str]) -> None:
        life_ms = round(self._options.superseded_ttl_s * 1000)
        count = self._values.shorten(pool.values(pages), life_ms)
        metrics.STATES.labels("superseded").inc(count)
        self._accounts.shortened(pool, self._root(span).tenant, pages, self._now_ms() + life_ms)

    def _account(self, pool: StoredPool, span: Span) -> None:
        now_ms = self._now_ms()
        dates = [now_ms + life for life in self.lives_ms(span)]
        self._accounts.stored(pool, self._root(span).tenant, span.keys, dates, now_ms)

    def _lifetimes(self, span: Span) -> Lifetimes:
        return Lifetimes(TTL_MS[self._root(span).ttl or self._options.ttl])

    def _root(self, span: Span) -> Root:
        page = span.root
        if page is None:
            return Root()
        known = self._roots.get(page)
        if known is not None:
            age_s = self._timer() - known[1]
            if age_s < (_ROOT_MISSING_S if known[0].tenant == UNKNOWN else _ROOT_FOUND_S):
                return known[0]
        record = self._values.record(root_key(page), RECORD_BYTES)
        root = known[0] if known is not None else Root()
        if record is not None:
            try:
                root = Root.decode(record)
            except ValueError as error:
                self._values.faults.count("root", error)
        self._roots.set(page, (root, self._timer()))
        return root

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
