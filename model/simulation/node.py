"""A node that serves: HBM, host memory, Redis, one queue of prefill.

A request waits until its KV fits beside what is running, in the order of arrival; then what no tier has is
computed, requests one after the other; then its answer is decoded beside the others', while nothing is
prefilled: SGLang lets decoding wait for that. With a store, what is there and not nearer is read into host
memory while the request waits, through one pipe. There it may be evicted again before the request's turn
comes, and is computed then; what was nearer and has been evicted meanwhile is asked for again (as by SGLang).
Everything computed is written through to host memory, and from there to the store, when it is prefilled and
when the answer ends; `cache_store.retention` says which states stay.

Prefill leaves a state where each of its chunks ends; one where KV went on without a state takes the place of
the next one behind it. What an answer has behind its last state is not kept.

Left out: batches that decode more slowly the larger they are, writes competing with reads.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_store.retention import Chain, StatePolicy
from model.capacity.budget import Budget
from model.capacity.machine import Machine
from model.simulation.events import Events
from model.simulation.tier import Tier, TreeInTier
from model.simulation.workload import PAGE_TOKENS, ROOT, Call, Tree

# SGLang's --hicache-storage-prefetch-retry-max-attempts.
MOST_FETCHES = 8
# `extra_buffer`: the state that is worked on and two that are tracked (mamba ping-pong buffers).
SLOTS_RUNNING = 3


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The store: its room and life of what is unused, and the profile's shortest fetch."""

    room_bytes: float = 4e12
    life_s: float = 3600.0
    least_tokens: int = 2048
    keep_every_tokens: int = 32_768


@dataclass(slots=True)
class Request:
    """A call of a run and what became of it; times in s, `hits` in tokens by tier.

    `measured` is when its first token and its last came, where that is known and not to be simulated.
    """

    number: int
    tree: Tree
    call: Call
    due_s: float
    done: "Callable[[Request], None]"
    first_token_s: float = 0.0
    end_s: float = 0.0
    hits: tuple[int, int, int] = (0, 0, 0)
    computed_tokens: int = 0
    fetched: int = 0
    matched: int = 0
    fetches: int = 0
    states: tuple[int, ...] = ()
    kept: int = ROOT
    measured: tuple[float, float] | None = None

    @property
    def prompt(self) -> Sequence[int]:
        """The nodes of the prompt that can be matched: its last token is computed in any case."""
        path = self.call.path
        whole = bool(path) and self.tree.ends[path[-1]] >= self.call.input_tokens
        return path[:-1] if whole else path

    @property
    def own_tokens(self) -> int:
        """KV of prompt and answer, in whole pages, that no node stands for."""
        tokens = self.call.input_tokens + self.call.output_tokens
        return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS - self.tree.ends[self.call.end]


@dataclass(slots=True)
class Traffic:
    """Bytes to and from the store."""

    read_bytes: float = 0.0
    written_bytes: float = 0.0
    peak_bytes: float = 0.0


@dataclass(slots=True)
class Node:
    """Serves requests; `store` None is SGLang alone."""

    machine: Machine
    budget: Budget
    events: Events
    store_settings: StoreSettings | None
    device: Tier = field(init=False)
    host: Tier | None = field(init=False)
    store: Tier | None = field(init=False)
    traffic: Traffic = field(default_factory=Traffic)
    running: int = 0
    _own_tokens: int = 0
    _waiting: deque[Request] = field(default_factory=deque[Request])
    _prefill_free_s: float = 0.0
    _prefill_s: float = 0.0
    _chunk_room: int = 0
    _last_chunk_s: float = -1.0
    _store_free_s: float = 0.0
    _policy: StatePolicy = field(init=False)

    def __post_init__(self) -> None:
        budget, settings = self.budget, self.store_settings
        assert budget.kv_tokens > 0 and budget.running_requests > 0, "the machine holds no request"
        self.device = Tier(budget.kv_tokens, budget.state_slots)
        self.host = self.store = None
        keep = settings.keep_every_tokens if settings else PAGE_TOKENS
        self._policy = StatePolicy(keep_every_tokens=keep, page_tokens=PAGE_TOKENS)
        if settings is not None:
            if budget.host_tokens:
                self.host = Tier(budget.host_tokens, budget.host_states, nearer=self.device)
            room = int(settings.room_bytes / budget.kv_bytes_per_token)
            self.store = Tier(room, 0, state_tokens=-(-budget.state_bytes // budget.kv_bytes_per_token))

    @property
    def tiers(self) -> list[Tier]:
        """The tiers that there are, the nearest first."""
        return [tier for tier in (self.device, self.host, self.store) if tier is not None]

    def submit(self, request: Request) -> None:
        """Take a request; `request.done` is called when its answer ends."""
        end_s = self._fetch(request)
        if end_s is None:
            self._waiting.append(request)
            self._start()
        else:
            self.events.at(end_s, lambda: self._fetched(request))

    def _matches(self, tier: Tier | None, request: Request) -> tuple[int, int]:
        if tier is None:
            return 0, 0
        return tier.match(tier.open(request.number, request.tree), request.prompt)

    def _fetch(self, request: Request) -> float | None:
        """Begin to read from the store what is not nearer; when it will be there, None for nothing."""
        store, settings = self.store, self.store_settings
        if store is None or settings is None:
            return None
        now_s, path, ends = self.events.now_s, request.call.path, request.tree.ends
        store.now_s = now_s
        store.expire(now_s - settings.life_s)
        _, depth = self._matches(store, request)
        nearer = [self._matches(tier, request) for tier in (self.device, self.host)]
        near_kv, near = max(kv for kv, _ in nearer), max(state for _, state in nearer)
        request.matched = near
        request.fetches += 1
        if depth <= near:
            return None
        if ends[path[depth - 1]] - (ends[path[near - 1]] if near else 0) < settings.least_tokens:
            return None
        begin = min(near_kv, depth)
        tokens = ends[path[depth - 1]] - (ends[path[begin - 1]] if begin else 0)
        size = tokens * self.budget.kv_bytes_per_token + self.budget.state_bytes
        self.traffic.read_bytes += size
        self._store_free_s = max(self._store_free_s, now_s) + size / self.machine.store_bytes_s
        store.use(store.open(request.number, request.tree), path, depth)
        request.fetched = depth
        return self._store_free_s

    def _fetched(self, request: Request, *, again: bool = False) -> None:
        if self.host is not None and request.fetched:
            # Nothing keeps it there until the request's turn: later ones may evict it.
            path = request.call.path[: request.fetched]
            self.host.now_s = self.events.now_s
            run = self.host.open(request.number, request.tree)
            if self.host.add(run, path):
                self.host.add_state(run, path[-1])
        if again:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)
        self._start()

    def _start(self) -> None:
        """Start waiting requests while they fit."""
        while self._waiting and self.running < self.budget.running_requests:
            request = self._waiting[0]
            end_s = self._fetch(request) if self._lost(request) else None
            if end_s is not None:
                self._waiting.popleft()
                self.events.at(end_s, lambda request=request: self._fetched(request, again=True))
                continue
            if not self._begin(request):
                return
            self._waiting.popleft()

    def _lost(self, request: Request) -> bool:
        """Whether what was near when the request came has been evicted while it waited."""
        if self.store is None or request.fetches >= MOST_FETCHES:
            return False
        near = max(self._matches(tier, request)[1] for tier in (self.device, self.host))
        return near < request.matched

    def _begin(self, request: Request) -> bool:
        now_s, call, device = self.events.now_s, request.call, self.device
        device.now_s = now_s
        run = device.open(request.number, request.tree)
        ends, path = request.tree.ends, call.path
        held, depth = device.match(run, request.prompt)
        device.use(run, path, depth)
        anchor = path[depth - 1] if depth else 0
        device.lock(run, anchor)
        # The state that is matched is copied into a slot of the request's own.
        device.state_room = self.budget.state_slots - SLOTS_RUNNING * (self.running + 1)
        device.token_room = self.budget.kv_tokens - self._own_tokens - request.own_tokens
        fits = device.add(run, call.nodes) and device.make_room(0)
        device.unlock(run, anchor)
        if not fits:
            device.token_room = self.budget.kv_tokens - self._own_tokens
            return False
        self._own_tokens += request.own_tokens
        device.lock(run, call.end)
        while device.states > device.state_room and device.evict_state():
            pass
        self.running += 1
        _, host_depth = self._matches(self.host, request)
        far = max(host_depth, depth, request.fetched if self.host is None else 0)
        near = max(depth, min(far, request.matched) if request.fetched else host_depth)
        tokens = [ends[path[at - 1]] if at else 0 for at in (depth, near, far)]
        if self.host is not None and host_depth > depth:
            self.host.use(self.host.open(request.number, request.tree), path, host_depth)
        request.hits = (tokens[0], tokens[1] - tokens[0], tokens[2] - tokens[1])
        request.computed_tokens = call.input_tokens - tokens[2]
        copied = max(0, tokens[2] - (ends[path[held - 1]] if held else 0)) * self.budget.kv_bytes_per_token
        copied += self.budget.state_bytes_per_rank * (far > depth)
        lengths = self._chunks(request.computed_tokens)
        if request.measured is None:
            begin_s = max(now_s + copied / self.machine.host_bytes_s, self._prefill_free_s)
            prefill_s = self.machine.request_s + request.computed_tokens / self.machine.prefill_tokens_s
            self._prefill_free_s = first_s = begin_s + prefill_s
            self._prefill_s += prefill_s
            self._last_chunk_s = first_s - lengths[-1] / self.machine.prefill_tokens_s
        else:
            first_s = request.measured[0]
        request.states = self._prefill_states(request, far, held, lengths)
        request.kept = (path[far - 1] if far else ROOT, *request.states, *call.answer)[-1]
        self.events.at(first_s, lambda: self._prefilled(request, run))
        return True

    def _chunks(self, tokens: int) -> list[int]:
        """How long the chunks of a prefill are; the first is what the last one before leaves, if in time."""
        chunk = self.budget.chunk_tokens
        room = self._chunk_room if self.events.now_s <= self._last_chunk_s else chunk
        lengths: list[int] = []
        left = tokens
        while left > 0:
            length = left if left <= room else room // PAGE_TOKENS * PAGE_TOKENS
            if length:
                lengths.append(length)
            left -= length
            self._chunk_room = room - length
            room = chunk
        return lengths or [0]

    def _prefill_states(
        self, request: Request, far: int, held: int, lengths: Sequence[int]
    ) -> tuple[int, ...]:
        """Where prefill leaves states, of a prompt with `far` restored nodes and KV of `held`."""
        path, ends = request.call.path, request.tree.ends
        if far >= len(path):
            return ()
        at, position = far, ends[path[far - 1]] if far else 0
        found: list[int] = []
        for length in lengths[:-1]:
            position += length
            while at + 1 < len(path) and ends[path[at]] <= position:
                at += 1
            if at > far and path[at - 1] not in found:
                found.append(path[at - 1])
        found.append(path[-1])
        if held > far:
            # One forward keeps one state, and where cached KV went on without one that place comes first.
            branch = path[held - 1]
            found[next(at for at, node in enumerate(found) if ends[node] >= ends[branch])] = branch
        return tuple(found)

    def _prefilled(self, request: Request, run: TreeInTier) -> None:
        request.first_token_s = now_s = self.events.now_s
        self.device.now_s = now_s
        for node in request.states:
            self.device.add_state(run, node)
        if request.states:
            self._write(request, request.states[-1], request.states)
        if request.measured is None:
            self._decode(request, run, (request.call.output_tokens - 1) / self.machine.decode_tokens_s)
        else:
            self.events.at(request.measured[1], lambda: self._finished(request, run))

    def _prefilled_s(self) -> float:
        """How long has been prefilled until now."""
        return self._prefill_s - max(0.0, self._prefill_free_s - self.events.now_s)

    def _decode(self, request: Request, run: TreeInTier, left_s: float) -> None:
        """Decode for `left_s`, and longer by what is prefilled meanwhile."""
        before_s = self._prefilled_s()

        def ended() -> None:
            lost_s = self._prefilled_s() - before_s
            if lost_s > 1e-6:
                self._decode(request, run, lost_s)
            else:
                self._finished(request, run)

        self.events.at(self.events.now_s + left_s, ended)

    def _finished(self, request: Request, run: TreeInTier) -> None:
        request.end_s = now_s = self.events.now_s
        call, device = request.call, self.device
        device.now_s = now_s
        self.running -= 1
        device.state_room = self.budget.state_slots - SLOTS_RUNNING * self.running
        self._own_tokens -= request.own_tokens
        device.token_room = self.budget.kv_tokens - self._own_tokens
        device.unlock(run, call.end)
        if call.answer:
            device.add_state(run, call.end)
        for node in reversed(call.path):
            if node == request.kept or call.answer:
                break
            device.forget(run, node)
        if request.kept:
            self._write(request, request.kept, (*request.states, *call.answer[-1:]))
        request.done(request)
        self._start()

    def _write(self, request: Request, end: int, states: Sequence[int]) -> None:
        """Write a request's nodes as far as `end`, and states, through to host memory and store."""
        nodes = request.call.nodes
        path = nodes[: nodes.index(end) + 1]
        for tier in self.tiers[1:]:
            tier.now_s = self.events.now_s
            run = tier.open(request.number, request.tree)
            before = tier.tokens + tier.evicted_tokens + tier.evicted_states * (tier.state_tokens or 0)
            if not tier.add(run, path):
                return  # the store is written from host memory
            for node in states:
                tier.add_state(run, node)
            if tier is self.store:
                after = tier.tokens + tier.evicted_tokens + tier.evicted_states * (tier.state_tokens or 0)
                self.traffic.written_bytes += (after - before) * self.budget.kv_bytes_per_token
                self._retain(run, path)
                held = tier.tokens * self.budget.kv_bytes_per_token
                self.traffic.peak_bytes = max(self.traffic.peak_bytes, held)

    def _retain(self, run: TreeInTier, path: Sequence[int]) -> None:
        """Drop the states of a chain that newer ones supersede."""
        assert self.store is not None
        ends = run.tree.ends
        nodes = {ends[node] // PAGE_TOKENS: node for node in path if run.states[node]}
        if not nodes:
            return
        forks = {ends[node] // PAGE_TOKENS for node in path if run.children[node] > 1}
        for position in self._policy.superseded(Chain(sorted(nodes), forks)):
            self.store.drop_state(run, nodes[position])
