"""From block ids to messages: which message covers which tokens of which prompt.

A trace has no roles. As AgentX does, a prompt becomes a system message (tools and system prompt), then user
and assistant messages whose borders lie where turns ended. The recorded text, not what the server answered,
is carried into the next turn.

**Branches.** A branch is a sequence of block ids that only grows. A request that extends the newest request
of its agent's branch (all blocks of it, then more) continues the branch; any other one forks: a new branch
which shares the longest prefix of blocks that any branch of the scope has. Up to the fork the prompts are
equal, from it on they differ, whichever way the trace diverges: an edit in the middle, a compaction, a
sub-agent, a retry.

**Positions.** A message covers the positions [start, end) of its prompt and every prompt that shares the
message has it at the same place. The endpoint's chat template spends some tokens on each message
(`Overhead`); the message's text is what is left, the words at its first positions. What the template puts
behind the last message (the generation prompt) is left out of the last message's end. So a prompt has
exactly the recorded number of tokens wherever its newest part is long enough for a message; where it is
not, the part is left out or lengthened, whichever is nearer, and the next turn makes up for it. Where a
fork cuts a message, prompts share what the blocks say, give or take the markup of one message.
"""

import bisect
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from replay.scale import Scale
from replay.trace import Request, Session

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


@dataclass(frozen=True, slots=True)
class Overhead:
    """Tokens of the endpoint's chat template: per message of a role, and once per prompt (`prompt`)."""

    system: int
    user: int
    assistant: int
    prompt: int

    def __post_init__(self) -> None:
        assert min(self.system, self.user, self.assistant, self.prompt) >= 0, self

    def of(self, role: str) -> int:
        """The tokens around a message of this role."""
        return {SYSTEM: self.system, USER: self.user, ASSISTANT: self.assistant}[role]


# What is planned is then the text alone.
NO_OVERHEAD: Final = Overhead(system=0, user=0, assistant=0, prompt=0)


@dataclass(slots=True, eq=False)
class Branch:
    """A growing sequence of block ids, dense within a scope; `tokens` is its newest prompt's length."""

    blocks: tuple[int, ...] = ()
    tokens: int = 0
    messages: "tuple[Message, ...]" = ()


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message over the positions [start, end) of its branch, of which `overhead` are not text."""

    role: str
    start: int
    end: int
    overhead: int
    branch: Branch

    def __post_init__(self) -> None:
        assert self.words >= 1, (self.role, self.start, self.end, self.overhead)

    @property
    def words(self) -> int:
        """The number of tokens of text, at least 1."""
        return self.text_end - self.start

    @property
    def text_end(self) -> int:
        """The position behind the last word."""
        return self.end - self.overhead


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request as it will be sent; all counts in scaled tokens.

    `input_tokens` is what the trace says, `planned_tokens` what the messages come to, `prefix_tokens` the
    longest prefix of full blocks that an earlier request of the scope had: what an infinite cache would
    hit.
    """

    messages: tuple[Message, ...]
    input_tokens: int
    planned_tokens: int
    output_tokens: int
    prefix_tokens: int


@dataclass(slots=True)
class Scope:
    """Where block ids mean the same: one session, or all sessions of a run."""

    branches: list[Branch] = field(default_factory=list[Branch])
    ids: "count[int]" = field(default_factory=count)
    dense: dict[int, int] = field(default_factory=dict[int, int])

    def blocks(self, request: Request) -> tuple[int, ...]:
        """The request's block ids, renumbered densely in the order of their first appearance."""
        dense, ids = self.dense, self.ids
        numbered: list[int] = []
        for block in request.blocks:
            number = dense.get(block)
            if number is None:
                number = dense[block] = next(ids)
            numbered.append(number)
        return tuple(numbered)

    def longest_prefix(self, blocks: tuple[int, ...]) -> tuple[Branch | None, int]:
        """The branch that shares most blocks, the newest of equals, and how many it shares."""
        best: Branch | None = None
        length = 0
        for branch in reversed(self.branches):
            if length < len(blocks) and branch.blocks[:length] == blocks[:length]:
                shared = common_prefix(branch.blocks, blocks)
                if shared > length:
                    best, length = branch, shared
        return best, length


def common_prefix(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many leading elements are equal."""
    limit = min(len(left), len(right))
    # Whether the first n differ is monotone in n, and comparing slices runs in C.
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda length: left[:length] != right[:length])


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the sessions of one run.

    With `cut_tails` a session that goes on keeps its last message only as far as the last full block, as
    AgentX does: what lies behind is in no later prompt.
    """

    scale: Scale
    overhead: Overhead
    cut_tails: bool = False
    shared: Scope = field(default_factory=Scope)

    def plan(self, session: Session) -> list[list[PlannedRequest]]:
        """For each agent of the session its requests, planned in the order of their recorded start."""
        scope = self.shared if session.shared_blocks else Scope()
        order = sorted(
            (request.start_s, index, number)
            for index, agent in enumerate(session.agents)
            for number, request in enumerate(agent.requests)
        )
        planned: list[list[PlannedRequest]] = [[] for _ in session.agents]
        current: dict[int, Branch] = {}
        grown: list[Branch] = []
        for _, index, number in order:
            agent = session.agents[index]
            request = agent.requests[number]
            previous_output = agent.requests[number - 1].output_tokens if number else 0
            blocks = scope.blocks(request)
            nearest, shared = scope.longest_prefix(blocks)
            tokens = self.scale.length(request.input_tokens)
            prefix_tokens = min(tokens, self.scale.position(shared * session.block_tokens))
            branch = current.get(index)
            if branch is None or not _extends(branch, blocks, tokens):
                branch = Branch()
                grown.append(branch)
                if nearest is not None:
                    self._fork(branch, nearest, prefix_tokens, tokens)
                scope.branches.append(branch)
                current[index] = branch
            elif self.cut_tails and tokens > branch.tokens:
                _cut_tail(branch, self.scale.position(len(branch.blocks) * session.block_tokens))
            branch.blocks, branch.tokens = blocks, tokens
            # A prompt that shares its start with another one has that one's head, or like it none.
            head_tokens = 0 if prefix_tokens else self.scale.position(agent.head_tokens)
            answer_tokens = self.scale.length(previous_output)
            self._append(branch, head_tokens, answer_tokens, tokens - self.overhead.prompt)
            planned[index].append(
                PlannedRequest(
                    messages=branch.messages,
                    input_tokens=tokens,
                    planned_tokens=branch.messages[-1].end + self.overhead.prompt,
                    output_tokens=self.scale.length(request.output_tokens),
                    prefix_tokens=prefix_tokens,
                )
            )
        for branch in grown:
            # Text behind the last known block: blocks that no other branch has.
            last = self.scale.block_at(branch.messages[-1].end, session.block_tokens)
            branch.blocks += tuple(next(scope.ids) for _ in range(len(branch.blocks), last + 1))
        return planned

    def _fork(self, branch: Branch, origin: Branch, shared: int, tokens: int) -> None:
        """Give a new branch the messages within the `shared` tokens, and the start of the one that is cut."""
        last = tokens - self.overhead.prompt - self.overhead.user - 1
        kept = [
            message
            for message in origin.messages
            if message.end <= shared or (message.text_end <= shared and message.end <= last)
        ]
        branch.messages = tuple(kept)
        if len(kept) == len(origin.messages):
            return
        cut = origin.messages[len(kept)]
        if cut.role == USER or cut.start >= shared:
            return
        # The system prompt keeps its border; an assistant's message ends where the fork is.
        end = cut.end if cut.role == SYSTEM else shared + cut.overhead
        end = min(end, last)
        if end - cut.start > cut.overhead:
            branch.messages = (*kept, Message(cut.role, cut.start, end, cut.overhead, branch))

    def _append(self, branch: Branch, head_tokens: int, answer_tokens: int, end: int) -> None:
        """Append messages so that the last one is a user's and ends at `end`, as nearly as can be."""
        overhead = self.overhead
        messages = list(branch.messages)
        start = messages[-1].end if messages else 0
        smallest_user = overhead.user + 1
        if not messages:
            head = min(head_tokens, end - smallest_user)
            if head > overhead.system:
                messages.append(Message(SYSTEM, 0, head, overhead.system, branch))
                start = head
        elif messages[-1].role == USER:
            smallest = overhead.assistant + 1
            if 2 * (end - start) < smallest + smallest_user:
                return  # leaving out what was added is nearer than putting two messages in
            # The recorded answer began behind the generation prompt, which its message replaces.
            room = max(smallest, end - start - smallest_user)
            length = min(room, max(smallest, overhead.prompt + answer_tokens))
            messages.append(Message(ASSISTANT, start, start + length, overhead.assistant, branch))
            start += length
        messages.append(Message(USER, start, max(end, start + smallest_user), overhead.user, branch))
        branch.messages = tuple(messages)


def _cut_tail(branch: Branch, known: int) -> None:
    """Cut the text of the last message at position `known`, where it has words before that."""
    last = branch.messages[-1]
    end = min(last.text_end, known) + last.overhead
    if end - last.start > last.overhead:
        branch.messages = (
            *branch.messages[:-1],
            Message(last.role, last.start, end, last.overhead, last.branch),
        )


def _extends(branch: Branch, blocks: tuple[int, ...], tokens: int) -> bool:
    return tokens >= branch.tokens and blocks[: len(branch.blocks)] == branch.blocks
