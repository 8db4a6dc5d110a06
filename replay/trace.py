"""A trace as replay knows it, whatever format it came in.

A session is a tree of agents; an agent is one conversation, a list of requests in the order of their start.
A request says how many tokens went in and came out, when, and which blocks of `block_tokens` tokens its
prompt began with: equal ids at equal places after an equal prefix mean equal tokens. What follows the last
full block has no id.
"""

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One recorded model call.

    Times in seconds since the start of the session; `service_s` is how long the recorded server took.
    `blocks` never covers more than `input_tokens`.
    """

    start_s: float
    service_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert math.isfinite(self.start_s), self.start_s
        assert math.isfinite(self.service_s) and self.service_s >= 0, self.service_s
        assert self.input_tokens >= 1, self.input_tokens
        assert self.output_tokens >= 0, self.output_tokens

    @property
    def end_s(self) -> float:
        """When the recorded answer was complete."""
        return self.start_s + self.service_s


@dataclass(frozen=True, slots=True)
class Agent:
    """One conversation of a session.

    `head_tokens` is the length of the tools and the system prompt together. `parent` is an index into the
    session's agents, None for the root. The agent starts after the parent's request `spawned_after` (None:
    with the session) and the parent's request `joined_before` waits for its end (None: nobody waits).
    `start_s` and `end_s` are the recorded span.
    """

    name: str
    head_tokens: int
    requests: tuple[Request, ...]
    start_s: float
    end_s: float
    parent: int | None = None
    spawned_after: int | None = None
    joined_before: int | None = None

    def __post_init__(self) -> None:
        assert self.head_tokens >= 0, self.head_tokens
        starts = [request.start_s for request in self.requests]
        assert starts == sorted(starts), f"requests of {self.name} are out of order"
        if self.joined_before is not None:
            assert self.joined_before > (-1 if self.spawned_after is None else self.spawned_after)


@dataclass(frozen=True, slots=True)
class Session:
    """One session: the root agent first, every parent before its children.

    With `shared_blocks` a block id means the same tokens in every session of a run, else only in this one.
    `arrival_s` is when the session began, in seconds from the start of its trace, 0 where that is not told.
    """

    name: str
    block_tokens: int
    agents: tuple[Agent, ...]
    shared_blocks: bool = False
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.block_tokens >= 1, self.block_tokens
        assert math.isfinite(self.arrival_s), self.arrival_s
        assert self.agents and self.agents[0].parent is None
        for index, agent in enumerate(self.agents):
            assert index == 0 or (agent.parent is not None and agent.parent < index), agent.name
            for request in agent.requests:
                assert len(request.blocks) * self.block_tokens <= request.input_tokens

    @property
    def turns(self) -> int:
        """The number of requests of all agents."""
        return sum(len(agent.requests) for agent in self.agents)

    def first_turns(self, limit: int) -> "Session":
        """The session with at most `limit` requests of each agent, without agents spawned later."""
        kept: dict[int, int] = {}
        agents: list[Agent] = []
        for index, agent in enumerate(self.agents):
            parent, spawned, joined = agent.parent, agent.spawned_after, agent.joined_before
            if parent is not None:
                if parent not in kept or (spawned is not None and spawned >= limit):
                    continue
                parent = kept[parent]
                joined = joined if joined is not None and joined < limit else None
            kept[index] = len(agents)
            agents.append(
                dataclasses.replace(
                    agent, requests=agent.requests[:limit], parent=parent, joined_before=joined
                )
            )
        return dataclasses.replace(self, agents=tuple(agents))
