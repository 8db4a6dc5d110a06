"""One tier of the cache: KV by nodes of prompts' trees and states at their ends, evicted as SGLang does.

`sglang.srt.mem_cache.unified_radix_cache` with its Full and Mamba components. KV goes leaf by leaf, the leaf
used longest ago first; a match uses the whole path. A state is matched where the path's deepest one lies, and
only that one counts as used; making room for a state takes the one used longest ago, with its KV when it lies
at a leaf, else alone. A leaf takes its state with it.

What a nearer tier holds can't be evicted from the one behind it: SGLang's host memory keeps its copies of
what is on the device, and evicts the rest.

A path's use is written at its deepest node alone: what lies above can't be evicted before, and takes the time
over when the leaf below it goes.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from model.simulation.workload import ROOT, Tree

NodeKey = tuple[int, int]


@dataclass(slots=True)
class TreeInTier:
    """Which nodes of one run's tree a tier holds; lists by node."""

    number: int
    tree: Tree
    held: bytearray
    states: bytearray
    locks: list[int]
    children: list[int]
    used: list[float]

    @classmethod
    def of(cls, number: int, tree: Tree) -> "TreeInTier":
        """Nothing but the root."""
        size = len(tree)
        held = bytearray(size)
        held[ROOT] = 1
        return cls(number, tree, held, bytearray(size), [0] * size, [0] * size, [0.0] * size)


@dataclass(slots=True)
class Tier:
    """A tier with room for `token_room` tokens and `state_room` states.

    With `state_tokens` both share one room: a state takes as much of `token_room` as so many tokens. Times
    are in seconds. `nearer`: the tier of which this one has copies, and keeps them while it has them.
    """

    token_room: int
    state_room: int
    state_tokens: int | None = None
    nearer: "Tier | None" = None
    tokens: int = 0
    evicted_tokens: int = 0
    evicted_states: int = 0
    now_s: float = 0.0
    _last_s: float = 0.0
    _behind: "Tier | None" = None
    _trees: dict[int, TreeInTier] = field(default_factory=dict[int, TreeInTier])
    _leaves: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    _states: OrderedDict[NodeKey, float] = field(default_factory=OrderedDict[NodeKey, float])

    def __post_init__(self) -> None:
        if self.nearer is not None:
            self.nearer._behind = self

    def _tick(self) -> float:
        """The time of a use: `now_s`, which the caller sets, but later than any before."""
        self._last_s = max(self.now_s, math.nextafter(self._last_s, math.inf))
        return self._last_s

    def open(self, number: int, tree: Tree) -> TreeInTier:
        """The tree of a run."""
        found = self._trees.get(number)
        if found is None:
            found = self._trees[number] = TreeInTier.of(number, tree)
        return found

    @property
    def states(self) -> int:
        """States held."""
        return len(self._states)

    def match(self, run: TreeInTier, path: Sequence[int]) -> tuple[int, int]:
        """How many nodes of the path are held, and how many as far as the deepest state; touches nothing."""
        held, low, high = run.held, 0, len(path)
        while low < high:
            middle = (low + high + 1) // 2
            if held[path[middle - 1]]:
                low = middle
            else:
                high = middle - 1
        states = run.states
        for depth in range(low, 0, -1):
            if states[path[depth - 1]]:
                return low, depth
        return low, 0

    def use(self, run: TreeInTier, path: Sequence[int], depth: int) -> None:
        """Count the first `depth` nodes as used now, and the state at their end."""
        if depth:
            node = path[depth - 1]
            run.used[node] = now_s = self._tick()
            if run.states[node]:
                self._states.move_to_end((run.number, node))
                self._states[run.number, node] = now_s

    def lock(self, run: TreeInTier, node: int) -> None:
        """Keep a node, and so what is above it, from being evicted."""
        run.locks[node] += 1

    def unlock(self, run: TreeInTier, node: int) -> None:
        """Let go of it."""
        run.locks[node] -= 1
        self._offer(run, node)

    def add(self, run: TreeInTier, path: Sequence[int]) -> bool:
        """Hold all nodes of the path, evicting others; whether there was room. What fits stays held."""
        for at, node in enumerate(path):
            if run.held[node]:
                continue
            parent = path[at - 1] if at else run.tree.parents[node]
            self.lock(run, parent)
            fits = self.make_room(run.tree.length(node))
            run.locks[parent] -= 1
            if not fits:
                self._offer(run, parent)
                return False
            self.tokens += run.tree.length(node)
            run.held[node] = 1
            run.children[parent] += 1
            run.used[node] = self._tick()
        if path:
            run.used[path[-1]] = self._tick()
            self._offer(run, path[-1])
        return True

    def add_state(self, run: TreeInTier, node: int) -> bool:
        """Hold the state at a node's end; whether there was room, and the node was still held.

        The node counts as used now, with what is above it.
        """
        if node == ROOT or not run.held[node]:
            return node == ROOT
        key = (run.number, node)
        run.used[node] = now_s = self._tick()
        if run.states[node]:
            self._states.move_to_end(key)
            self._states[key] = now_s
            return True
        self.lock(run, node)
        if self.state_tokens is None:
            while len(self._states) >= self.state_room and self.evict_state():
                pass
            fits = len(self._states) < self.state_room
        else:
            fits = self.make_room(self.state_tokens)
            self.tokens += self.state_tokens if fits else 0
        if fits:
            run.states[node] = 1
            self._states[key] = now_s
        self.unlock(run, node)
        return fits

    def drop_state(self, run: TreeInTier, node: int) -> None:
        """Forget a state; its KV stays."""
        if run.states[node]:
            run.states[node] = 0
            del self._states[run.number, node]
            self.tokens -= self.state_tokens or 0

    def forget(self, run: TreeInTier, node: int) -> None:
        """Let a node go that nothing is below, no state is at and nobody locks."""
        if run.held[node] and not (run.children[node] or run.states[node] or run.locks[node]):
            self._remove(run, node)

    def make_room(self, tokens: int) -> bool:
        """Evict until so many tokens are free; False when all that is left is locked."""
        while self.tokens + tokens > self.token_room:
            if not (self._evict_oldest() if self.state_tokens else self._evict_leaf()):
                return False
        return True

    def expire(self, before_s: float) -> None:
        """Drop what was not used since `before_s`."""
        while self._states and next(iter(self._states.values())) < before_s and self.evict_state():
            pass
        self._settle()
        while self._leaves and self._leaves[0][0] < before_s and self._evict_leaf():
            self._settle()

    def _evict_oldest(self) -> bool:
        """Evict the state or the leaf used longest ago, in a shared room."""
        self._settle()
        if self._states:
            key, used = next(iter(self._states.items()))
            if not self._leaves or used < self._leaves[0][0]:
                run = self._trees[key[0]]
                if not run.locks[key[1]]:
                    self.evicted_states += 1
                    self.drop_state(run, key[1])
                    return True
        return self._evict_leaf()

    def _settle(self) -> None:
        """Bring a leaf with its true time of use to the heap's top."""
        leaves = self._leaves
        while leaves:
            used, number, node = leaves[0]
            run = self._trees[number]
            if not self._is_leaf(run, node):
                heapq.heappop(leaves)
            elif run.used[node] != used:
                heapq.heapreplace(leaves, (run.used[node], number, node))
            else:
                return

    def _evict_leaf(self) -> bool:
        self._settle()
        if not self._leaves:
            return False
        _, number, node = heapq.heappop(self._leaves)
        self._remove(self._trees[number], node)
        return True

    def evict_state(self) -> bool:
        """Evict the state used longest ago; False when all are locked."""
        for number, node in self._states:
            run = self._trees[number]
            nearer = self._nearer(run)
            if run.locks[node] or (nearer is not None and nearer.states[node]):
                continue
            if nearer is not None and nearer.held[node] and not run.children[node]:
                continue
            if run.children[node]:
                self.evicted_states += 1
                self.drop_state(run, node)
            else:
                self._remove(run, node)
            return True
        return False

    def _remove(self, run: TreeInTier, node: int) -> None:
        parent = run.tree.parents[node]
        self.evicted_tokens += run.tree.length(node)
        self.tokens -= run.tree.length(node)
        self.evicted_states += run.states[node]
        self.drop_state(run, node)
        run.held[node] = 0
        run.children[parent] -= 1
        run.used[parent] = max(run.used[parent], run.used[node])
        self._offer(run, parent)
        if self._behind is not None and (behind := self._behind._trees.get(run.number)) is not None:
            self._behind._offer(behind, node)

    def _nearer(self, run: TreeInTier) -> TreeInTier | None:
        """The same run's tree in the nearer tier."""
        return None if self.nearer is None else self.nearer._trees.get(run.number)

    def _is_leaf(self, run: TreeInTier, node: int) -> bool:
        """Whether a node can be evicted."""
        if node == ROOT or not run.held[node] or run.children[node] or run.locks[node]:
            return False
        nearer = self._nearer(run)
        return nearer is None or not nearer.held[node]

    def _offer(self, run: TreeInTier, node: int) -> None:
        if self._is_leaf(run, node):
            heapq.heappush(self._leaves, (run.used[node], run.number, node))

    def check_integrity(self) -> None:
        """Assert that the counts are those of what is held."""
        runs = self._trees.values()
        held = sum(
            run.tree.length(node) for run in runs for node in range(1, len(run.held)) if run.held[node]
        )
        states = sum(sum(run.states) for run in runs)
        assert self.tokens == held + (self.state_tokens or 0) * states, (self.tokens, held, states)
        assert len(self._states) == states
        for run in runs:
            for node in range(1, len(run.held)):
                assert not run.held[node] or run.held[run.tree.parents[node]], "a node without its parent"
                assert not run.states[node] or run.held[node], "a state without its KV"
