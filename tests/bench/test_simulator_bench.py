"""The parts of the comparison of simulator and engine that need no engine."""

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.replay_rates import Rates
from bench.simulator import PAGE_TOKENS, in_pages, pools, tiers_alone
from model.simulation.result import Policy
from model.simulation.workload import synthetic
from replay.client import Answer
from replay.layout import PlannedRequest
from replay.record import Record
from replay.scale import Scale
from replay.trace import Agent, Request, Session
from replay.usage import Usage

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def session(*blocks: tuple[int, ...], block_tokens: int = 64) -> Session:
    requests = [Request(8.0 * at, 4.0, len(ids) * block_tokens + 5, 40, ids) for at, ids in enumerate(blocks)]
    return Session("s", block_tokens, (Agent("root", 30, tuple(requests), 0.0, 99.0),))


@settings(max_examples=60, deadline=None)
@given(prompts, prompts, st.sampled_from(["1", "1/4", "1/3", "3/4"]), st.sampled_from([16, 64, 512]))
def test_prompts_share_the_pages_that_their_blocks_cover(left, right, text, block_tokens):
    scale = Scale.parse(text)
    made = in_pages(session(tuple(left), tuple(right), block_tokens=block_tokens), scale, 1.0)
    first, second = (request.blocks for request in made.agents[0].requests)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    whole = min(scale.position(shared * block_tokens) // PAGE_TOKENS, len(first), len(second))
    assert common == whole
    assert len(first) == scale.position(len(left) * block_tokens) // PAGE_TOKENS


def test_times_and_lengths_are_scaled():
    made = in_pages(session((1, 2), (1, 2, 3)), Scale.parse("1/2"), 0.25)
    request = made.agents[0].requests[1]
    assert (request.start_s, request.service_s, request.input_tokens, request.output_tokens) == (2, 1, 98, 20)
    assert made.block_tokens == PAGE_TOKENS and made.agents[0].head_tokens == 15


def record(sent_s: float, first_s: float, end_s: float, prompt: int, cached: int, output: int) -> Record:
    answer = Answer(sent_s, first_s, end_s, Usage(prompt, output, cached), {})
    return Record("s", "root", 0, PlannedRequest((), prompt, prompt, output, 0), sent_s, sent_s, answer)


def test_rates_are_those_of_the_replay():
    # A prefill takes 0.5 s and 0.01 s a token. Two wait at once from 0 to 5 s, one alone from 10 to 10.5 s.
    records = [
        record(0, 2.5, 6.5, 300, 100, 5),
        record(1, 5, 7, 200, 0, 5),
        record(10, 10.5, 11.5, 100, 100, 1),
    ]
    rates = Rates.of(records)
    assert (rates.request_s, rates.prefill) == (pytest.approx(0.5), pytest.approx(100))
    # Decoding stands still while anyone waits: of the first for 2.5 s.
    assert rates.decode == pytest.approx(8 / (1.5 + 2 + 1))


def served(session: Session, turn: int, begin_s: float) -> Record:
    request = session.agents[0].requests[turn]
    answer = Answer(begin_s, begin_s + 1, begin_s + 2, Usage(request.input_tokens, 8, 0), {})
    planned = PlannedRequest((), request.input_tokens, request.input_tokens, 8, 0)
    return Record(session.name, "root", turn, planned, begin_s, begin_s, answer)


@pytest.mark.parametrize(("kv_tokens", "all_found"), [(16_384, True), (2304, False)])
def test_the_tiers_alone_follow_the_times_of_the_replay(kv_tokens, all_found):
    sessions = synthetic(2, 1500, 8, 8, 1.0, 0)
    records = [
        served(session, turn, 10.0 * turn + 5.0 * place)
        for turn in range(8)
        for place, session in enumerate(sessions)
    ]
    budget, rates = pools(kv_tokens, 48, 8, 512, store=False), Rates(1000.0, 10.0)
    found = tiers_alone(sessions, budget, rates, Policy("sglang"), records, 300.0)
    blocks = [len(request.blocks) for request in sessions[0].agents[0].requests]
    tokens = sum(request.input_tokens for request in sessions[0].agents[0].requests)
    theory = sum(blocks[:-1]) * PAGE_TOKENS / tokens
    assert found == pytest.approx(theory) if all_found else found < theory - 0.2
