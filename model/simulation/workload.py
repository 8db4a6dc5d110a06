"""Sessions as the simulator runs them: radix trees of prompts, found once, and calls as paths in them.

A session's tree has a node for each stretch of blocks between two places where prompts end or part, or where
a chunk of prefill ends. An answer is a node too, as far as the last state of decoding. A replay discards what
the server answered and goes on with the recorded text, so that an answer is a leaf which no later prompt goes
through; with `continued` answers are what was recorded, as in a real session, and lie on the next prompt's
path.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from model.capacity.budget import CHUNK_TOKENS
from replay.layout import common_prefix
from replay.trace import Agent, Request, Session

ROOT = 0
PAGE_TOKENS = 64
# Chunks that requests share end anywhere; so finely are the places told apart.
CHUNK_PARTS = 8
Blocks = tuple[int, ...]


@dataclass(slots=True)
class Tree:
    """A radix tree; `ends` are the tokens from the root to each node's end.

    Decoding leaves states at multiples of `track_tokens`.
    """

    block_tokens: int
    track_tokens: int = PAGE_TOKENS
    parents: list[int] = field(default_factory=lambda: [ROOT])
    ends: list[int] = field(default_factory=lambda: [0])
    _edges: list[Blocks] = field(default_factory=lambda: [()])
    _children: list[dict[int, int]] = field(default_factory=lambda: [{}])

    def __len__(self) -> int:
        return len(self.parents)

    def length(self, node: int) -> int:
        """Tokens of a node."""
        return self.ends[node] - self.ends[self.parents[node]]

    def insert(self, blocks: Blocks) -> None:
        """Let a prompt of these blocks end at a node."""
        node, at = ROOT, 0
        while at < len(blocks):
            child = self._children[node].get(blocks[at])
            if child is None:
                self._add(node, blocks[at:])
                return
            shared = common_prefix(self._edges[child], blocks[at:])
            if shared < len(self._edges[child]):
                child = self._split(node, child, shared)
            node, at = child, at + shared

    def cut(self, blocks: Blocks, begin: int, tokens: int) -> None:
        """Let nodes of an inserted prompt end at multiples of `tokens`, from block `begin` on."""
        every = max(1, tokens // self.block_tokens)
        for end in range((begin // every + 1) * every, len(blocks), every):
            self.insert(blocks[:end])

    def path(self, blocks: Blocks) -> list[int]:
        """The nodes of an inserted prompt, from the root's child on."""
        nodes: list[int] = []
        node, at = ROOT, 0
        while at < len(blocks):
            node = self._children[node][blocks[at]]
            nodes.append(node)
            at += len(self._edges[node])
        return nodes

    def leaf(self, parent: int, tokens: int) -> int:
        """A node of so many tokens that no prompt goes through."""
        return self._append(parent, (), self.ends[parent] + tokens)

    def _add(self, parent: int, edge: Blocks) -> int:
        node = self._append(parent, edge, self.ends[parent] + len(edge) * self.block_tokens)
        self._children[parent][edge[0]] = node
        return node

    def _append(self, parent: int, edge: Blocks, end: int) -> int:
        self.parents.append(parent)
        self.ends.append(end)
        self._edges.append(edge)
        self._children.append({})
        return len(self.parents) - 1

    def _split(self, parent: int, child: int, shared: int) -> int:
        edge = self._edges[child]
        middle = self._add(parent, edge[:shared])
        self._children[middle][edge[shared]] = child
        self._edges[child] = edge[shared:]
        self.parents[child] = middle
        return middle


@dataclass(frozen=True, slots=True)
class Call:
    """One request: its prompt is `path`, `answer` the nodes after it; `gap_s` is from the answer before.

    `input_tokens` includes what lies behind the last full block; `prefix_tokens` is what an infinite cache
    would have.
    """

    path: tuple[int, ...]
    answer: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    prefix_tokens: int
    gap_s: float

    @property
    def nodes(self) -> tuple[int, ...]:
        """Prompt and answer; empty when both are shorter than a block."""
        return self.path + self.answer

    @property
    def end(self) -> int:
        """The node where the answer ends."""
        return (ROOT, *self.nodes)[-1]


@dataclass(frozen=True, slots=True)
class Conversation:
    """An agent's calls. It starts `lead_s` after call `after` of its parent, which waits with `before`."""

    calls: tuple[Call, ...]
    parent: int | None
    after: int | None
    before: int | None
    lead_s: float


@dataclass(frozen=True, slots=True)
class Script:
    """A session to run: its tree and conversations, the root's first; `shared` trees are one for all runs."""

    name: str
    tree: Tree
    conversations: tuple[Conversation, ...]
    shared: bool
    peak_tokens: int


def scripts(
    sessions: Sequence[Session],
    idle_cap_s: float,
    *,
    continued: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
    track_tokens: int = PAGE_TOKENS,
) -> list[Script]:
    """The scripts of sessions, gaps cut to `idle_cap_s`; sessions with shared blocks get one tree.

    `continued` is explained above. Prefill goes in chunks of `chunk_tokens`, decoding leaves a state at each
    multiple of `track_tokens`.
    """
    shared: dict[int, Tree] = {}
    made: list[Script] = []
    for session in sessions:
        if session.shared_blocks:
            tree = shared.setdefault(session.block_tokens, Tree(session.block_tokens, track_tokens))
        else:
            tree = Tree(session.block_tokens, track_tokens)
        for agent in session.agents:
            before: Blocks = ()
            for request in agent.requests:
                tree.insert(request.blocks)
                tree.cut(request.blocks, common_prefix(before, request.blocks), chunk_tokens // CHUNK_PARTS)
                before = request.blocks
            if continued:
                for blocks in _continuations(agent, tree):
                    tree.insert(blocks or ())
        made.append(Script(session.name, tree, (), session.shared_blocks, 0))
    # A later session may part the nodes of an earlier one, so that paths are looked up when all are in.
    seen: dict[int, set[int]] = {}
    return [
        _script(session, script, idle_cap_s, continued, seen.setdefault(id(script.tree), {ROOT}))
        for session, script in zip(sessions, made, strict=True)
    ]


def _script(session: Session, draft: Script, idle_cap_s: float, continued: bool, seen: set[int]) -> Script:
    tree = draft.tree
    order = sorted(
        (request.start_s, index, number)
        for index, agent in enumerate(session.agents)
        for number, request in enumerate(agent.requests)
    )
    calls: list[list[Call]] = [[] for _ in session.agents]
    ends = [_continuations(agent, tree) for agent in session.agents]
    for _, index, number in order:
        agent = session.agents[index]
        path = tree.path(agent.requests[number].blocks)
        known = next((node for node in reversed(path) if node in seen), ROOT)
        answer = tuple(tree.path(ends[index][number] or ())[len(path) :]) if continued else ()
        seen.update(path)
        seen.update(answer)
        gap_s = min(max(0.0, _gap_s(agent, number)), idle_cap_s)
        calls[index].append(_call(tree, agent.requests[number], path, answer, tree.ends[known], gap_s))
    conversations = tuple(
        Conversation(
            tuple(calls[index]),
            agent.parent,
            agent.spawned_after,
            agent.joined_before,
            min(max(0.0, _lead_s(session, agent)), idle_cap_s),
        )
        for index, agent in enumerate(session.agents)
    )
    peak = max(call.input_tokens + call.output_tokens for listed in calls for call in listed)
    return Script(draft.name, tree, conversations, draft.shared, peak)


def _call(
    tree: Tree, request: Request, path: list[int], answer: tuple[int, ...], prefix_tokens: int, gap_s: float
) -> Call:
    if not answer:
        end = path[-1] if path else ROOT
        tracked = _last_tracked(request, tree)
        answer = (tree.leaf(end, tracked - tree.ends[end]),) if tracked > request.input_tokens else ()
    output_tokens = max(1, request.output_tokens)
    return Call(tuple(path), answer, request.input_tokens, output_tokens, prefix_tokens, gap_s)


def _last_tracked(request: Request, tree: Tree) -> int:
    """The last place where decoding may leave a state: an answer's last token is never computed."""
    every = math.lcm(tree.block_tokens, tree.track_tokens)
    return (request.input_tokens + request.output_tokens - 1) // every * every


def _continuations(agent: Agent, tree: Tree) -> list[Blocks | None]:
    """For each request the blocks to its answer's last state, None where the next prompt parts before."""
    found: list[Blocks | None] = []
    for request, following in zip(agent.requests, [*agent.requests[1:], None], strict=True):
        blocks = request.blocks
        goes_on = following is not None and following.blocks[: len(blocks)] == blocks
        end = _last_tracked(request, tree) // tree.block_tokens
        if goes_on and following is not None and len(following.blocks) >= end > len(blocks):
            found.append(following.blocks[:end])
        else:
            found.append(None)
    return found


def _gap_s(agent: Agent, number: int) -> float:
    before_s = agent.requests[number - 1].end_s if number else agent.start_s
    return agent.requests[number].start_s - before_s


def _lead_s(session: Session, agent: Agent) -> float:
    if agent.parent is None:
        return 0.0
    parent = session.agents[agent.parent]
    after = agent.spawned_after
    return agent.start_s - (parent.start_s if after is None else parent.requests[after].end_s)


def synthetic(
    sessions: int, context_tokens: int, turns: int, output_tokens: int, gap_s: float, seed: int
) -> list[Session]:
    """Sessions whose prompts grow evenly; their mean over a session is `context_tokens`.

    A prompt begins at half the mean and ends at one and a half; gaps are exponential with mean `gap_s`.
    """
    source = random.Random(seed)
    made: list[Session] = []
    for number in range(sessions):
        requests: list[Request] = []
        now_s = 0.0
        for turn in range(turns):
            share = 0.5 + (turn / (turns - 1) if turns > 1 else 0.5)
            tokens = max(64, int(context_tokens * share))
            requests.append(Request(now_s, 0.0, tokens, output_tokens, tuple(range(tokens // 64))))
            now_s += source.expovariate(1 / gap_s) if gap_s else 0.0
        made.append(Session(f"made-{number}", 64, (Agent("root", 0, tuple(requests), 0.0, now_s),)))
    return made
