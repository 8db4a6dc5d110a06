"""What is sent has the prefixes that the block ids say, and the counts that the trace says."""

import itertools
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.filler import Filler
from replay.formats import read_sessions
from replay.layout import (
    ASSISTANT,
    NO_OVERHEAD,
    SYSTEM,
    USER,
    Overhead,
    PlannedRequest,
    Planner,
    common_prefix,
)
from replay.scale import Scale
from replay.trace import Agent, Request, Session

WORDS = tuple(f" w{number}" for number in range(200))
BLOCK = 16
KEY = b"0123456789abcdef"


@dataclass
class Template:
    """Markup before and after each message, before and after the prompt."""

    before: int
    after: int
    generation: int

    @property
    def overhead(self):
        around = self.before + self.after
        return Overhead(system=around, user=around, assistant=around, prompt=self.generation)

    def render(self, planned: PlannedRequest, filler: Filler) -> list[str]:
        tokens = []
        for message in planned.messages:
            words = filler.text(message).split(" ")[1:]
            tokens += [f"<{message.role}>"] * self.before + words + [f"</{message.role}>"] * self.after
        return [*tokens, *["<generate>"] * self.generation]


@st.composite
def sessions(draw) -> Session:
    """Conversations that grow, are cut, edited, retried and compacted, and sub-agents that share a start."""
    ids = itertools.count(1)
    agents = []
    start_s = 0.0
    for index in range(draw(st.integers(1, 3))):
        origin = draw(st.sampled_from([request for agent in agents for request in agent.requests] or [None]))
        blocks: list[int] = []
        if origin is not None and origin.blocks:
            blocks = list(origin.blocks[: draw(st.integers(0, len(origin.blocks)))])
        requests = []
        for _ in range(draw(st.integers(1, 6))):
            blocks = blocks[: len(blocks) - draw(st.sampled_from([0, 0, 0, 0, 1, 2, 5, 1000])) or None]
            blocks = blocks[: draw(st.sampled_from([len(blocks), len(blocks), len(blocks) // 2]))]
            blocks += [next(ids) for _ in range(draw(st.integers(0, 12)))]
            tokens = max(1, len(blocks) * BLOCK + draw(st.integers(0, BLOCK - 1)))
            start_s += 1.0
            requests.append(Request(start_s, 0.5, tokens, draw(st.integers(0, 60)), tuple(blocks)))
        agents.append(
            Agent(
                name=f"agent{index}",
                head_tokens=draw(st.integers(0, 64)),
                requests=tuple(requests),
                start_s=requests[0].start_s,
                end_s=requests[-1].end_s,
                parent=0 if index else None,
            )
        )
    return Session("made", BLOCK, tuple(agents))


templates = st.builds(Template, st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
scales = st.sampled_from([Scale(), Scale(Fraction(1, 2)), Scale(Fraction(3, 7)), Scale(Fraction(1, 4))])


def plan(session: Session, scale: Scale, overhead: Overhead) -> list[tuple[Request, PlannedRequest]]:
    """All requests of the session in the order of their start."""
    planned = Planner(scale, overhead).plan(session)
    pairs = [
        (request, plan)
        for agent, plans in zip(session.agents, planned, strict=True)
        for request, plan in zip(agent.requests, plans, strict=True)
    ]
    return sorted(pairs, key=lambda pair: pair[0].start_s)


def shared(left: list[str], right: list[str]) -> int:
    return common_prefix(tuple(left), tuple(right))


def test_a_tail_is_cut_where_the_session_goes_on():
    grows = (
        Request(0.0, 1.0, 2 * BLOCK + 5, 4, (1, 2)),
        Request(2.0, 1.0, 4 * BLOCK + 3, 4, (1, 2, 3, 4)),
        Request(4.0, 1.0, 4 * BLOCK + 3, 4, (1, 2, 3, 4)),
    )
    session = Session("s", BLOCK, (Agent("root", 0, grows, 0.0, 5.0),))

    def ends(planner):
        return [[(m.role, m.end) for m in p.messages] for p in planner.plan(session)[0]]

    added = 2 * BLOCK + 4
    cut = [(USER, 2 * BLOCK), (ASSISTANT, added), (USER, 4 * BLOCK + 3)]
    assert ends(Planner(Scale(), NO_OVERHEAD, cut_tails=True)) == [[(USER, 2 * BLOCK + 5)], cut, cut]
    kept = [(USER, 2 * BLOCK + 5), (ASSISTANT, added + 5), (USER, 4 * BLOCK + 3)]
    assert ends(Planner(Scale(), NO_OVERHEAD)) == [[(USER, 2 * BLOCK + 5)], kept, kept]


@given(sessions(), scales)
def test_cut_tails_leave_the_counts_and_the_shared_blocks(session, scale):
    planned = Planner(scale, NO_OVERHEAD, cut_tails=True).plan(session)
    filler = Filler(WORDS, scale, BLOCK, KEY)
    for plans, whole in zip(planned, Planner(scale, NO_OVERHEAD).plan(session), strict=True):
        for cut, kept in zip(plans, whole, strict=True):
            assert cut.prefix_tokens == kept.prefix_tokens
            assert abs(cut.planned_tokens - cut.input_tokens) <= 2
            texts = [
                "".join(filler.text(message) for message in plan.messages).split() for plan in (cut, kept)
            ]
            assert texts[0][: cut.prefix_tokens] == texts[1][: cut.prefix_tokens]


@given(sessions(), scales)
def test_filler_has_the_prefix_relation_of_the_blocks(session, scale):
    requests = plan(session, scale, Template(0, 0, 0).overhead)
    filler = Filler(WORDS, scale, BLOCK, KEY)
    texts = [
        filler.words_at(planned.messages[-1].branch, 0, scale.position(len(request.blocks) * BLOCK))
        for request, planned in requests
    ]
    for left, right in itertools.combinations(range(len(requests)), 2):
        blocks = common_prefix(requests[left][0].blocks, requests[right][0].blocks)
        common = shared(texts[left], texts[right])
        assert scale.block_at(common, BLOCK) == blocks
        assert common >= scale.position(blocks * BLOCK)


@given(sessions(), scales, templates)
def test_a_prompt_shares_what_its_blocks_say(session, scale, template):
    requests = plan(session, scale, template.overhead)
    filler = Filler(WORDS, scale, BLOCK, KEY)
    prompts = [template.render(planned, filler) for _, planned in requests]
    # Where messages are cut, room is needed for one more message and the markup behind what is shared.
    markup = 2 * template.overhead.user + template.overhead.prompt + 1
    for right in range(len(requests)):
        said, promised, best = 0, 0, 0
        for left in range(right):
            blocks = common_prefix(requests[left][0].blocks, requests[right][0].blocks)
            tokens = scale.position(blocks * BLOCK)
            common = shared(prompts[left], prompts[right])
            said = max(said, tokens)
            promised = max(promised, min(tokens, min(len(prompts[left]), len(prompts[right])) - markup))
            best = max(best, common)
            if blocks < len(requests[left][0].blocks):
                assert common < scale.position((blocks + 2) * BLOCK) + markup
        # A prompt's last tokens ask for an answer, which this template does not begin with them.
        assert best >= promised - template.generation
        assert requests[right][1].prefix_tokens == min(said, requests[right][1].input_tokens)


@given(sessions(), scales, templates)
def test_prompts_are_well_formed_and_as_long_as_planned(session, scale, template):
    filler = Filler(WORDS, scale, BLOCK, KEY)
    for request, planned in plan(session, scale, template.overhead):
        roles = [message.role for message in planned.messages]
        assert roles[-1] == USER
        assert SYSTEM not in roles[1:]
        assert roles[0] != ASSISTANT
        assert all(left != right for left, right in itertools.pairwise(roles))
        ends = [message.end for message in planned.messages]
        assert [message.start for message in planned.messages] == [0, *ends[:-1]]
        assert planned.input_tokens == max(1, scale.position(request.input_tokens))
        assert len(template.render(planned, filler)) == planned.planned_tokens
        smallest = template.overhead.user + template.overhead.assistant + template.overhead.prompt + 2
        assert abs(planned.planned_tokens - planned.input_tokens) <= smallest


def grown(*lengths: int, output: int = 40) -> Session:
    """One conversation in which every prompt begins with the one before."""
    blocks = tuple(range(max(lengths)))
    requests = tuple(
        Request(float(number), 0.1, tokens, output, blocks[: tokens // BLOCK])
        for number, tokens in enumerate(lengths)
    )
    return Session("grown", BLOCK, (Agent("root", 100, requests, 0.0, 9.0),))


def test_a_growing_conversation_appends_an_answer_and_a_question():
    template = Template(3, 2, 4)
    requests = [planned for _, planned in plan(grown(300, 500, 705), Scale(), template.overhead)]
    first, second, third = (planned.messages for planned in requests)
    assert [message.role for message in third] == [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER]
    assert third[:4] == second and second[:2] == first
    assert [planned.planned_tokens for planned in requests] == [300, 500, 705]
    assert second[2].start == 300 - 4
    assert second[2].end == 300 + 40  # the answer follows the first prompt, generation prompt and all
    assert [planned.prefix_tokens for planned in requests] == [0, 300 // 16 * 16, 500 // 16 * 16]


def test_what_is_too_short_for_a_message_is_made_up_for_by_the_next_turn():
    template = Template(3, 3, 5)
    lengths = [300, 306, 308, 312, 400]
    requests = [planned for _, planned in plan(grown(*lengths), Scale(), template.overhead)]
    assert [planned.planned_tokens for planned in requests] == [300, 300, 314, 314, 400]


def test_a_fork_keeps_the_messages_before_it_and_the_start_of_the_one_it_cuts():
    blocks = tuple(range(60))
    edited = (*blocks[:25], *range(100, 120))
    requests = (
        Request(0.0, 0.1, 320, 32, blocks[:20]),
        Request(1.0, 0.1, 960, 32, blocks[:60]),
        Request(2.0, 0.1, 720, 32, edited),
    )
    session = Session("edited", BLOCK, (Agent("root", 96, requests, 0.0, 9.0),))
    template = Template(3, 2, 4)
    first, second, third = (planned for _, planned in plan(session, Scale(), template.overhead))
    assert third.prefix_tokens == 25 * BLOCK
    assert third.messages[:3] == second.messages[:3]  # system, user, answer
    cut, whole = third.messages[3], second.messages[3]
    assert (cut.role, cut.start, cut.end) == (USER, whole.start, 716)
    filler = Filler(WORDS, Scale(), BLOCK, KEY)
    common = shared(template.render(second, filler), template.render(third, filler))
    assert 25 * BLOCK <= common < 25 * BLOCK + template.before + 1
    assert first.messages == second.messages[:2]


def test_one_prompt_sent_twice_is_the_same_prompt():
    first, second = (planned for _, planned in plan(grown(300, 300), Scale(), Template(3, 2, 4).overhead))
    assert first.messages == second.messages
    assert second.prefix_tokens == 300 // 16 * 16


def test_blocks_are_shared_between_sessions_only_when_the_trace_says_so():
    overhead = Template(1, 1, 1).overhead
    for shared_blocks, hit in [(True, 288), (False, 0)]:
        planner = Planner(Scale(), overhead)
        session = grown(300)
        session = Session("one", BLOCK, session.agents, shared_blocks)
        planner.plan(session)
        ((planned,),) = planner.plan(Session("two", BLOCK, session.agents, shared_blocks))
        assert planned.prefix_tokens == hit


@pytest.mark.parametrize("factor", [Fraction(1), Fraction(1, 8), Fraction(1, 32)])
def test_recorded_sessions_keep_their_counts_and_their_theoretical_hit(factor, traces: Path):
    template = Template(8, 6, 6)
    scale = Scale(factor)
    for session in read_sessions([traces]):
        requests = plan(session, scale, template.overhead)
        seen: set[int] = set()
        for request, planned in requests:
            known = len(list(itertools.takewhile(seen.__contains__, request.blocks)))
            assert planned.prefix_tokens == scale.position(known * 64)
            seen.update(request.blocks)
            assert abs(planned.planned_tokens - planned.input_tokens) <= (2 * 14 + 2) / 2
            if factor == 1:
                assert planned.planned_tokens == planned.input_tokens
