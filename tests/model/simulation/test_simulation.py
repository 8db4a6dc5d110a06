"""The simulated tiers against their rules, and the whole against what it is known to show."""

import dataclasses
import json
import random
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.capacity.budget import Budget
from model.capacity.machine import MACHINES
from model.simulation.chart import draw
from model.simulation.events import Events
from model.simulation.node import Node, Request
from model.simulation.result import POLICIES, Policy, Settings, simulate
from model.simulation.tier import Tier
from model.simulation.workload import ROOT, Call, Tree, scripts, synthetic
from replay.statistics import statistics
from replay.trace import Agent, Session
from replay.trace import Request as Recorded
from service.cli import main

MACHINE = dataclasses.replace(
    MACHINES["b300-8"], prefill_tokens_s=20_000.0, decode_tokens_s=100.0, store_bytes_s=5e9
)


def make_budget(kv_tokens: int, states: int, host_tokens: int = 0) -> Budget:
    return Budget(
        hbm_bytes=1,
        static_bytes=1,
        weight_bytes=1,
        short_bytes=0,
        kv_bytes_per_token=1000,
        state_bytes_per_rank=1_000_000,
        state_bytes=8_000_000,
        kv_tokens=kv_tokens,
        state_slots=states,
        host_tokens=host_tokens,
        host_states=states if host_tokens else 0,
    )


def chain(*ends: int) -> tuple[Tree, list[int]]:
    tree = Tree(1)
    for end in ends:
        tree.insert(tuple(range(end)))
    return tree, tree.path(tuple(range(ends[-1])))


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(prompts)
def test_paths_cover_their_prompts_and_share_what_prompts_share(made):
    tree = Tree(64)
    for blocks in made:
        tree.insert(blocks)
    for blocks in made:
        path = tree.path(blocks)
        assert tree.ends[path[-1]] == 64 * len(blocks)
        assert sum(map(tree.length, path)) == 64 * len(blocks)
        assert [tree.parents[node] for node in path] == [ROOT, *path[:-1]]
        for other in made:
            shared = next((n for n in range(8, -1, -1) if blocks[:n] == other[:n]), 0)
            common = [node for node in path if node in tree.path(other)]
            assert (tree.ends[common[-1]] if common else 0) <= 64 * min(shared, len(blocks))


@settings(max_examples=60, deadline=None)
@given(prompts, st.integers(1, 12), st.integers(1, 4), st.booleans(), st.integers(0, 9))
def test_a_tier_never_holds_more_than_it_has_room_for(made, room, states, shared, seed):
    tree = Tree(1)
    for blocks in made:
        tree.insert(blocks)
    tier = Tier(room, states, state_tokens=2 if shared else None)
    source = random.Random(seed)
    for step in range(20):
        run = tier.open(source.randrange(2), tree)
        path = tree.path(source.choice(made))
        tier.now_s = float(step)
        kv, state = tier.match(run, path)
        assert all(run.held[node] for node in path[:kv]) and state <= kv
        tier.use(run, path, state)
        if tier.add(run, path):
            tier.add_state(run, path[-1])
        tier.check_integrity()
        assert tier.tokens <= room and (shared or tier.states <= states)
    tier.expire(1e9)
    assert (tier.tokens, tier.states) == (0, 0)


def test_the_leaf_used_longest_ago_goes_first_and_what_is_locked_stays():
    tree, path = chain(2, 4, 6)
    tier = Tier(10, 10)
    first, second = tier.open(1, tree), tier.open(2, tree)
    assert tier.add(first, path) and tier.add(second, path[:2])
    tier.lock(first, path[2])
    assert not tier.add(tier.open(3, tree), path)
    assert first.held[path[2]] and not second.held[path[0]]
    tier.unlock(first, path[2])
    assert tier.add(tier.open(3, tree), path)
    assert [first.held[node] for node in path] == [1, 1, 0]


def test_a_state_in_the_middle_goes_alone_and_one_at_a_leaf_with_its_kv():
    tree, path = chain(2, 4)
    tier = Tier(100, 2)
    run, other = tier.open(1, tree), tier.open(2, tree)
    tier.add(run, path)
    tier.add_state(run, path[0])
    tier.add_state(run, path[1])
    tier.use(run, path, 1)  # the shallow state is the one that was used last
    tier.add(other, path[:1])
    tier.add_state(other, path[0])
    assert tier.match(run, path) == (1, 1)  # the deep state was a leaf's
    tier.add(other, path)
    tier.add_state(other, path[1])
    assert tier.match(run, path) == (0, 0)


def test_a_state_above_others_leaves_its_kv_behind():
    tree, path = chain(2, 4)
    tier = Tier(100, 2)
    run = tier.open(1, tree)
    tier.add(run, path)
    tier.add_state(run, path[0])
    tier.add_state(run, path[1])
    other = tier.open(2, tree)
    tier.add(other, path[:1])
    tier.add_state(other, path[0])
    assert run.held[path[0]] and tier.match(run, path) == (2, 2) and not run.states[path[0]]


def test_prefixes_are_those_of_the_trace_statistics():
    sessions = synthetic(5, 5000, 12, 100, 10.0, 3)
    found = statistics(sessions)
    made = scripts(sessions, 300.0)
    calls = [call for script in made for talk in script.conversations for call in talk.calls]
    total = sum(call.input_tokens for call in calls)
    assert sum(call.prefix_tokens for call in calls) / total == pytest.approx(found.theoretical_hit)
    assert found.input.mean == pytest.approx(5000, rel=0.02)


def test_continued_answers_lie_on_the_next_prompt():
    requests = (
        Recorded(0.0, 1.0, 130, 130, (1, 2)),
        Recorded(5.0, 1.0, 400, 10, (1, 2, 3, 4, 5, 6)),
    )
    session = Session("s", 64, (Agent("root", 0, requests, 0.0, 6.0),))
    (discarded,) = scripts([session], 300.0)
    (continued,) = scripts([session], 300.0, continued=True)
    assert discarded.conversations[0].calls[1].prefix_tokens == 128
    assert continued.conversations[0].calls[1].prefix_tokens == 256
    assert continued.conversations[0].calls[0].answer[-1] in continued.conversations[0].calls[1].path


def node_with(kv_tokens, states, **changes):
    budget = dataclasses.replace(make_budget(kv_tokens, states), **changes)
    return Node(MACHINE, budget, Events(), None)


def ask(node, number, tree, blocks, output_tokens=1, answer=(), input_tokens=None):
    """Serve one request to its end."""
    tokens = 64 * len(blocks) + 10 if input_tokens is None else input_tokens
    call = Call(tuple(tree.path(blocks)), answer, tokens, output_tokens, 0, 0.0)
    request = Request(number, tree, call, node.events.now_s, lambda request: None)
    node.submit(request)
    node.events.run(lambda: False)
    for tier in node.tiers:
        tier.check_integrity()
    return request


def test_prefill_leaves_a_state_where_each_chunk_ends():
    tree = Tree(64)
    prompt = tuple(range(10))
    tree.insert(prompt)
    tree.cut(prompt, 0, 256)
    node = node_with(6400, 40, chunk_tokens=256)
    ask(node, 0, tree, prompt)
    held = node.device.open(0, tree)
    assert [tree.ends[at] for at in tree.path(prompt) if held.states[at]] == [256, 512, 640]
    # A prompt that parts from it within the second chunk goes on from the end of the first.
    other = (*range(6), 99)
    tree.insert(other)
    node = node_with(6400, 40, chunk_tokens=256)
    ask(node, 0, tree, prompt)
    assert ask(node, 0, tree, other).hits == (256, 0, 0)


def test_a_prompt_begins_in_the_chunk_that_the_one_before_leaves_room_in():
    tree = Tree(64)
    first, second = tuple(range(4)), tuple(range(100, 110))
    for prompt in (first, second):
        tree.insert(prompt)
        tree.cut(prompt, 0, 64)
    node = node_with(6400, 40, chunk_tokens=256)
    for number, (prompt, tokens) in enumerate(((first, 300), (second, 650))):
        call = Call(tuple(tree.path(prompt)), (), tokens, 1, 0, 0.0)
        node.submit(Request(number, tree, call, 0.0, lambda request: None))
    node.events.run(lambda: False)
    held = node.device.open(1, tree)
    # The first leaves 212 tokens of its second chunk, which are three pages.
    assert [tree.ends[at] for at in tree.path(second) if held.states[at]] == [192, 448, 640]


def test_where_kv_went_on_without_a_state_one_takes_the_place_of_the_prompts_end():
    tree = Tree(64)
    long, short, longer = tuple(range(8)), (0, 1, 2, 3, 90), (0, 1, 2, 3, 91, 92)
    for prompt in (long, short, longer):
        tree.insert(prompt)
    node = node_with(6400, 40)
    assert ask(node, 0, tree, long).hits == (0, 0, 0)
    assert ask(node, 0, tree, short).hits == (0, 0, 0)
    held = node.device.open(0, tree)
    assert [tree.ends[at] for at in tree.path(short) if held.states[at]] == [256]
    # What lay behind that one state is not kept.
    assert not held.held[tree.path(short)[-1]] and node.device.tokens == 512
    assert ask(node, 0, tree, longer).hits == (256, 0, 0)


def test_an_answer_is_kept_as_far_as_its_last_state():
    request = Recorded(0.0, 1.0, 200, 120, (1, 2, 3))
    session = Session("s", 64, (Agent("root", 0, (request,), 0.0, 1.0),))
    (coarse,) = scripts([session], 300.0, track_tokens=256)
    (fine,) = scripts([session], 300.0, track_tokens=64)
    (call,), (same,) = coarse.conversations[0].calls, fine.conversations[0].calls
    assert coarse.tree.ends[call.end] == 256
    # Of 320 tokens the last one is never computed, so that no state is at its end.
    assert fine.tree.ends[same.end] == 256
    short = dataclasses.replace(request, output_tokens=20)
    (script,) = scripts(
        [dataclasses.replace(session, agents=(Agent("root", 0, (short,), 0.0, 1.0),))],
        300.0,
        track_tokens=256,
    )
    assert not script.conversations[0].calls[0].answer


def test_the_last_token_of_a_prompt_is_computed_again():
    tree = Tree(64)
    tree.insert((0, 1))
    node = node_with(6400, 40)
    ask(node, 0, tree, (0, 1), input_tokens=128)
    assert ask(node, 0, tree, (0, 1), input_tokens=128).hits == (0, 0, 0)
    assert ask(node, 0, tree, (0, 1), input_tokens=129).hits == (128, 0, 0)


def test_decoding_stands_still_while_a_prompt_is_prefilled():
    tree = Tree(64)
    for prompt in ((0,), tuple(range(100, 1100))):
        tree.insert(prompt)
    node = node_with(128_000, 40)
    # 10 s of decoding from 0.0037 s on; after 5 s a prompt that takes 3.2 s. The first token is prefill's.
    first = Request(0, tree, Call(tuple(tree.path((0,))), (), 74, 1001, 0, 0.0), 0.0, lambda request: None)
    path = tuple(tree.path(tuple(range(100, 1100))))
    second = Request(0, tree, Call(path, (), 64_001, 1, 0, 0.0), 5.0, lambda request: None)
    node.submit(first)
    node.events.at(5.0, lambda: node.submit(second))
    node.events.run(lambda: False)
    assert second.first_token_s == pytest.approx(5.0 + 64_001 / 20_000)
    assert first.end_s == pytest.approx(74 / 20_000 + 10.0 + 64_001 / 20_000)


def test_measured_times_are_taken_as_they_were():
    tree = Tree(64)
    tree.insert((0, 1))
    node = node_with(6400, 40)
    call = Call(tuple(tree.path((0, 1))), (), 138, 4, 0, 0.0)
    request = Request(0, tree, call, 0.0, lambda request: None, measured=(7.0, 9.0))
    node.submit(request)
    node.events.run(lambda: False)
    assert (request.first_token_s, request.end_s) == (7.0, 9.0)


def test_what_a_running_request_works_on_takes_room():
    tree = Tree(64)
    for prompt in ((0,), (1,)):
        tree.insert(prompt)
    node = node_with(320, 40)
    ask(node, 0, tree, (0,))
    assert node.device.tokens == 64
    # 64 + 10 tokens of prompt and 182 of output are four pages, of which one is the prompt's node.
    ask(node, 1, tree, (1,), output_tokens=182)
    assert node.device.tokens == 128 and node.device.token_room == 320
    ask(node, 1, tree, (1,), output_tokens=182 + 64)
    assert node.device.tokens == 64


def test_once_runs_each_session_a_single_time_from_its_beginning(sessions):
    point = run("sglang", 3, make_budget(640_000, 200), sessions, requests=16 * 30, once=True)
    assert point.requests == sum(session.turns for session in sessions)
    found = statistics(sessions)
    assert point.theoretical == pytest.approx(found.theoretical_hit)


def run(policy, concurrency, budget, sessions, requests=300, **changes):
    made = scripts(sessions, 300.0)
    return simulate(
        MACHINE, budget, made, Policy(policy), concurrency, Settings(requests=requests, **changes)
    )


@pytest.fixture(scope="module")
def sessions():
    return synthetic(16, 50_000, 30, 400, 10.0, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_fits_is_found_by_every_policy(policy, sessions):
    point = run(policy, 2, make_budget(640_000, 200, 640_000), sessions)
    assert point.hit_ratio > 0.99 and point.hit_device == pytest.approx(point.hit)
    assert point.hit + point.recompute == pytest.approx(1.0)
    assert point.ttft.p50 < 1 and point.waited == 0


def test_oversubscription_collapses_alone_and_not_with_admission(sessions):
    found = make_budget(320_000, 200, 640_000)
    alone, redis, both = (run(p, 24, found, sessions) for p in ("sglang", "redis", "redis+admission"))
    admitted = run("admission", 24, found, sessions)
    assert alone.hit_ratio < 0.2 and alone.prefill_busy > 0.7
    # What was fetched for those that wait in the engine is evicted again before their turn.
    assert redis.hit_ratio < 0.5 and redis.store_read_bytes_s > 0
    assert both.hit_ratio > 0.9 and both.hit_store > 0.3 and both.waited > 0
    assert both.turns_per_hour > 2 * max(alone.turns_per_hour, redis.turns_per_hour)
    assert admitted.hit_ratio > 2 * alone.hit_ratio and admitted.waited > 0


def test_a_store_needs_host_memory_for_all_that_wait(sessions):
    roomy = make_budget(320_000, 200, 1_600_000)
    point = run("redis", 24, roomy, sessions)
    assert point.hit_ratio > 0.9


def test_states_alone_can_be_what_is_short(sessions):
    many, few = (run("sglang", 6, make_budget(1_280_000, states), sessions) for states in (200, 12))
    assert many.hit_ratio > 0.95 and few.hit_ratio < 0.5


def test_the_same_seed_gives_the_same_point(sessions):
    found = make_budget(320_000, 60, 320_000)
    first, again, other = (run("redis+admission", 10, found, sessions, 100, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_sub_agents_run_beside_their_parent_and_are_waited_for():
    def request(start_s, blocks):
        return Recorded(start_s, 1.0, 64 * len(blocks), 64, blocks)

    root = Agent("root", 0, (request(0.0, (1,)), request(50.0, (1, 2))), 0.0, 51.0)
    child = Agent("a", 0, (request(2.0, (8,)), request(40.0, (8, 9))), 1.0, 41.0, 0, 0, 1)
    made = scripts([Session("s", 64, (root, child))], 300.0)
    point = simulate(
        MACHINE,
        make_budget(6400, 50),
        made,
        Policy("sglang"),
        1,
        Settings(requests=40, start_share=0.0),
    )
    # A session takes 4 requests; the parent waits for the gaps of 1 + 37 s, then goes on.
    assert point.requests == 40
    assert point.duration_s / 10 == pytest.approx(49 + 1.7, rel=0.1)


def test_the_command_reports_and_draws(capsys, tmp_path):
    picture = tmp_path / "curve.svg"
    arguments = ["simulate", "--context", "20000", "--turns", "6", "--requests", "60", "--concurrency", "2,4"]
    assert main([*arguments, "--json", "--svg", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["points"]) == 8 and found["requests"] == 8 * 60
    assert {point["policy"] for point in found["points"]} == set(POLICIES)
    ElementTree.parse(picture)
    assert main([*arguments, "--policy", "sglang"]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
    for wrong in (["--policy", "magic"], ["--concurrency", "0"], ["--concurrency", "x"]):
        with pytest.raises(SystemExit):
            main([*arguments, *wrong])
    with pytest.raises(ValueError, match="no points"):
        draw([], "x")


@pytest.mark.slow
def test_options_reach_the_simulation(capsys):
    base = ["simulate", "--context", "30000", "--turns", "20", "--requests", "200", "--concurrency", "24"]
    base += ["--policy", "redis", "--kv-tokens", "200000", "--state-slots", "60", "--json"]

    def point(*more):
        assert main([*base, *more]) == 0
        return json.loads(capsys.readouterr().out)

    plain = point()
    for option, value, field, wanted in (
        ("--prefill", "5000", "prefill_tokens_s", 5000),
        ("--decode", "10", "decode_tokens_s", 10),
        ("--store-gbs", "2", "store_bytes_s", 2e9),
    ):
        assert point(option, value)["machine"][field] == wanted
    assert point("--decode", "10")["points"][0]["turns_per_hour"] < plain["points"][0]["turns_per_hour"]
    assert point("--kv-dtype", "fp8")["budget"]["kv_bytes_per_token"] == 13_824
    assert point("--state-dtype", "bf16")["budget"]["state_bytes"] == 232_316_928
    small = point("--store-gb", "1")["points"][0]
    assert small["store_peak_bytes"] <= 1e9 < plain["points"][0]["store_peak_bytes"]
    discarded, continued = plain["points"][0], point("--answers", "continued")["points"][0]
    assert continued["theoretical"] > discarded["theoretical"]
    burst = point("--start-spacing", "0")["points"][0]
    assert burst["duration_s"] != plain["points"][0]["duration_s"]
