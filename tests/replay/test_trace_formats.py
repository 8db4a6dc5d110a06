"""The formats beside Weka, and the way back into Weka."""

import json
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay.errors import TraceError
from replay.formats import read_sessions
from replay.formats.chain import BlockChain
from replay.formats.weka import weka_document
from replay.statistics import statistics
from service.cli import main

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def lines(path: Path, rows) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def read(path: Path):
    return list(read_sessions([path]))


times = st.integers(0, 10_000).map(lambda value: value / 8)


@st.composite
def weka_requests(draw, depth=0):
    entries = []
    for _ in range(draw(st.integers(1, 4))):
        if depth < 2 and draw(st.integers(0, 3)) == 0:
            entries.append(
                {
                    "t": draw(times),
                    "type": "subagent",
                    "agent_id": draw(st.sampled_from("abc")),
                    "duration_ms": draw(st.integers(0, 10_000)) * 125,
                    "system_tokens": draw(st.integers(0, 50)),
                    "requests": [
                        {"t": 0, "type": "n", "in": 1, "out": 0},
                        *draw(weka_requests(depth=depth + 1)),
                    ],
                }
            )
        else:
            tokens = draw(st.integers(1, 500))
            ids = draw(st.lists(st.integers(-5, 2**62), max_size=tokens // 64))
            entries.append(
                {
                    "t": draw(times),
                    "type": "s",
                    "in": tokens,
                    "out": draw(st.integers(0, 9)),
                    "hash_ids": ids,
                    "api_time": draw(times),
                }
            )
    return entries


@few
@given(requests=weka_requests(), scope=st.sampled_from(["local", "global"]), arrival=times)
def test_a_session_written_as_weka_is_read_as_it_was(requests, scope, arrival, tmp_path):
    requests.append({"t": 0, "type": "n", "in": 1, "out": 1})
    document = {"id": "x", "block_size": 64, "hash_id_scope": scope, "requests": requests}
    path = tmp_path / "trace.json"
    path.write_bytes(orjson.dumps({**document, "arrival_s": arrival}))
    (once,) = read(path)
    path.write_bytes(orjson.dumps(weka_document(once)))
    (twice,) = read(path)
    assert twice.arrival_s == arrival
    assert sorted(map(_shape, twice.agents), key=repr) == sorted(map(_shape, once.agents), key=repr)
    path.write_bytes(orjson.dumps(weka_document(twice)))
    assert read(path) == [twice]


def _shape(agent):
    return (agent.name, agent.head_tokens, agent.requests, agent.start_s, agent.end_s)


@few
@given(turns=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 900), st.integers(0, 300)), min_size=1))
def test_a_chain_of_blocks_shares_what_it_is_told_and_no_more(turns):
    chain = BlockChain(64, 1000)
    before: tuple[int, ...] = ()
    for shared, tokens, output in turns:
        known = chain.blocks
        blocks = chain.prompt(shared, tokens, output)
        kept = min(shared // 64, tokens // 64, len(known))
        assert len(blocks) == tokens // 64 and blocks[:kept] == known[:kept]
        assert not set(blocks[kept:]) & set(known) and min(blocks, default=1000) >= 1000
        before += blocks[kept:]
    assert len(before) == len(set(before))


def mooncake(tokens, ids, **values):
    return {"input_length": tokens, "output_length": 100, "hash_ids": ids, **values}


def test_mooncake_rows_are_sessions_of_one_request(tmp_path):
    path = lines(
        tmp_path / "m.jsonl",
        [mooncake(1300, [7, 8, 9], timestamp=0), mooncake(1024, [7, 8], timestamp=2500)],
    )
    first, second = read(path)
    assert first.agents[0].requests[0].blocks == (7, 8) and first.shared_blocks
    assert (second.arrival_s, second.agents[0].requests[0].start_s) == (2.5, 0.0)
    assert statistics([first, second]).theoretical_hit == pytest.approx(1024 / 2324)


def test_mooncake_sessions_append_to_their_prompts_and_answers(tmp_path):
    rows = [
        mooncake(1100, [1, 2, 3], session_id="a", timestamp=1000),
        mooncake(600, [1, 90], session_id="b"),
        mooncake(500, [50], session_id="a", delay=2000),
        mooncake(30, [51], session_id="a", delay=500),
    ]
    a, b = read(lines(tmp_path / "m.jsonl", rows))
    assert [r.input_tokens for r in a.agents[0].requests] == [1100, 1700, 1830]
    assert [r.start_s for r in a.agents[0].requests] == [0.0, 2.0, 2.5] and a.arrival_s == 1.0
    first, second, third = (r.blocks for r in a.agents[0].requests)
    assert first == (1, 2) and second[:2] == (1, 2) and third == second and second[2] < 0
    assert b.agents[0].requests[0].blocks == (1,)


def test_mooncake_sessions_of_whole_prompts_keep_their_ids(tmp_path):
    rows = [
        mooncake(1024, [1, 2], session_id="a"),
        mooncake(1600, [1, 2, 3, 4], session_id="a", timestamp=70),
    ]
    (session,) = read(lines(tmp_path / "m.jsonl", rows))
    assert [r.blocks for r in session.agents[0].requests] == [(1, 2), (1, 2, 3)]


def body(*messages, **values):
    roles = ("user", "assistant")
    return {
        "model": "m",
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)],
        **values,
    }


def test_a_payload_file_of_a_folder_is_a_session_and_alone_it_is_many(tmp_path):
    question, answer = "q" * 2000, "a" * 800
    rows = [body(question, max_tokens=5), body(question, answer, "more" * 100), body(question, answer, "x")]
    path = lines(tmp_path / "s1.jsonl", rows)
    (session,) = read(tmp_path)
    first, second, third = session.agents[0].requests
    assert (session.name, first.output_tokens) == ("s1", 5)
    assert second.blocks[: len(first.blocks)] == first.blocks and len(first.blocks) == 7
    assert third.blocks[:10] == second.blocks[:10]
    assert [len(each.agents[0].requests) for each in read(path)] == [1, 1, 1]


def test_inputs_json_and_an_answers_length_from_the_next_turn(tmp_path):
    path = tmp_path / "inputs.json"
    payloads = [body("q" * 400), body("q" * 400, "a" * 400, "more")]
    path.write_text(json.dumps({"data": [{"session_id": "s", "payloads": payloads}]}))
    (session,) = read(path)
    assert session.name == "s"
    assert [r.output_tokens for r in session.agents[0].requests] == [(400 + 33) // 4, 1]


def test_swe_agent_counts_the_models_own_answers_alone(tmp_path):
    history = [
        {"role": "system", "content": "s" * 400, "agent": "primary"},
        {"role": "assistant", "content": "shown", "is_demo": True},
        {"role": "user", "content": "u" * 400},
        {"role": "assistant", "content": "a" * 400, "thought": "t" * 4000},
        {"role": "user", "content": "o" * 400},
        {"role": "assistant", "content": "b" * 40},
    ]
    path = tmp_path / "run.traj"
    path.write_text(json.dumps({"trajectory": [], "history": history, "info": {}}))
    (session,) = read(path)
    first, second = session.agents[0].requests
    assert second.input_tokens > first.input_tokens + first.output_tokens >= 200 + 100
    assert second.blocks[: len(first.blocks)] == first.blocks and session.agents[0].head_tokens > 100


def round_row(index, tokens, prefix, start, end, **values):
    return {
        "session_id": "claude:1",
        "round_index": index,
        "input_tokens_total": tokens,
        "prefix_tokens": prefix,
        "output_tokens": 10,
        "timing_events": [
            {"event_type": "user_message", "timestamp": start},
            {"event_type": "text", "timestamp": end},
        ],
        **values,
    }


def test_tracelab_rounds(tmp_path):
    rows = [
        round_row(1, 6400, 3200, "2026-06-01T05:00:20.500Z", "2026-06-01T05:00:22Z"),
        round_row(0, 3300, 2000, "2026-06-01T05:00:00Z", "2026-06-01T05:00:10Z"),
    ]
    (session,) = read(lines(tmp_path / "t.jsonl", rows))
    first, second = session.agents[0].requests
    assert (first.service_s, second.start_s, second.service_s) == (10.0, 20.5, 1.5)
    assert second.blocks[:50] == first.blocks[:50] and second.blocks[50] not in first.blocks


def log(kind, uuid, parent, second, *, message=None, **values):
    return {
        "type": kind,
        "uuid": uuid,
        "parentUuid": parent,
        "sessionId": "s",
        "timestamp": f"2026-06-01T05:00:{second:02}Z",
        "message": message or {"role": "user", "content": "x"},
        **values,
    }


def answer(identity, fresh, read_tokens, output):
    usage = {"input_tokens": fresh, "cache_read_input_tokens": read_tokens, "output_tokens": output}
    return {"id": identity, "role": "assistant", "usage": usage}


def claude_log():
    return [
        {"type": "summary", "summary": "x", "leafUuid": "d"},
        log("user", "a", None, 0),
        log("assistant", "b", "a", 3, message=answer("m1", 1000, 0, 1)),
        log("assistant", "c", "b", 5, message=answer("m1", 1000, 0, 200)),
        log("user", "d", "c", 9),
        log("assistant", "e", "d", 12, message=answer("m2", 700, 1000, 30)),
        log("user", "f", None, 20, isCompactSummary=True),
        log("assistant", "g", "f", 22, message=answer("m3", 600, 640, 5)),
        log("assistant", "h", "g", 23, message={"id": "m4", "usage": {"input_tokens": 0}}),
    ]


def subagent_log():
    side = {"isSidechain": True, "agentId": "w1"}
    return [
        log("user", "p", None, 5, **side),
        log("assistant", "q", "p", 8, message=answer("m9", 320, 0, 7), **side),
    ]


@pytest.mark.parametrize("where", ["inside", "beside", "below"])
def test_claude_code_logs_with_sub_agents(tmp_path, where):
    main_log = claude_log() + (subagent_log() if where == "inside" else [])
    path = lines(tmp_path / "s.jsonl", main_log)
    if where != "inside":
        folder = tmp_path if where == "beside" else tmp_path / "s" / "subagents"
        folder.mkdir(parents=True, exist_ok=True)
        lines(folder / "agent-w1.jsonl", subagent_log())
    (session,) = read(tmp_path)
    assert read(path) == [session]
    root, side = session.agents
    assert [(r.start_s, r.service_s, r.input_tokens, r.output_tokens) for r in root.requests] == [
        (0, 5, 1000, 200),
        (9, 3, 1700, 30),
        (20, 2, 1240, 5),
    ]
    first, second, third = (r.blocks for r in root.requests)
    assert second[:15] == first and third[:10] == second[:10] and third[10] not in second
    assert (side.name, side.spawned_after, side.joined_before, side.start_s) == ("w1", 0, 1, 5.0)
    assert side.requests[0].input_tokens == 320


def test_a_continued_turn_shares_the_answer_too(tmp_path):
    rows = [log("user", "a", None, 0)]
    for number, total in enumerate((1000, 3000, 5000)):
        parent = rows[-1]["uuid"]
        rows.append(
            log("assistant", f"a{number}", parent, 2 * number, message=answer(f"m{number}", total, 0, 1000))
        )
        rows.append(log("user", f"u{number}", f"a{number}", 2 * number + 1))
    (session,) = read(lines(tmp_path / "s.jsonl", rows))
    first, second, third = (r.blocks for r in session.agents[0].requests)
    assert third[: 4000 // 64] == second[: 3000 // 64] + third[3000 // 64 : 4000 // 64]
    assert second[:15] == first


@pytest.mark.parametrize(
    ("name", "rows", "where", "problem"),
    [
        ("m.jsonl", [mooncake(100, [1]), mooncake("x", [1])], "line 2 input_length", "integer"),
        ("m.jsonl", [mooncake(100, [1, 2])], "line 1 hash_ids", "2 ids for at most 1"),
        ("m.jsonl", [mooncake(100, [1], timestamp="now")], "line 1 timestamp", "milliseconds"),
        ("m.jsonl", [mooncake(100, [1], session_id=4)], "line 1 session_id", "text"),
        ("m.jsonl", [mooncake(100, [1]), [1]], "line 2", "object"),
        (
            "t.jsonl",
            [round_row(0, 9, 0, "soon", "2026-06-01T05:00:22Z")],
            "line 1 timing_events[0].timestamp",
            "ISO",
        ),
        ("t.jsonl", [round_row(0, 0, 0, "2026-06-01", "2026-06-01")], "line 1 input_tokens_total", "least 1"),
        ("t.jsonl", [round_row(0, 9, 0, "", "", timing_events=[])], "line 1 timing_events", "event"),
        ("p.jsonl", [{"messages": []}], "line 1 messages", "hold a message"),
        ("p.jsonl", [body("x"), {"messages": ["x"]}], "line 2 messages[0]", "object"),
        ("i.json", [{"data": [{"session_id": "s", "payloads": []}]}], "data[0].payloads", "request body"),
        ("i.json", [{"data": [{"payloads": [body("x")]}]}], "data[0].session_id", "text"),
        ("s.traj", [{"trajectory": [], "history": [{"content": "x"}]}], "history[0].role", "text"),
        ("s.traj", [{"trajectory": [], "history": []}], "history", "no answer"),
        (
            "c.jsonl",
            [log("assistant", "b", None, 0, message=answer("m", -1, 0, 0))],
            "line 1 message.usage.input_tokens",
            "least 0",
        ),
        ("c.jsonl", [log("user", "b", None, 0)], "", "no model call"),
    ],
)
def test_errors_name_the_file_the_line_and_the_field(tmp_path, name, rows, where, problem):
    path = lines(tmp_path / name, rows)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert (caught.value.path, caught.value.where) == (path, where)
    assert problem in caught.value.problem


def test_the_command_prints_statistics_and_converts(tmp_path, traces, capsys):
    assert main(["trace", "stats", str(traces), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sessions"], found["requests"], found["subagents"]) == (3, 31, 2)
    assert 0.5 < found["theoretical_hit"] < 1 and found["input"]["p50"] > 10_000
    lines(tmp_path / "s.jsonl", claude_log())
    assert main(["trace", "convert", str(tmp_path / "s.jsonl"), "--to", str(tmp_path / "out"), "--json"]) == 0
    (written,) = json.loads(capsys.readouterr().out)["files"]
    assert statistics(read(Path(written))) == statistics(read(tmp_path / "s.jsonl"))
    assert main(["trace", "stats", str(traces)]) == 0
    assert "theoretical prefix hit rate" in capsys.readouterr().out
    assert main(["trace", "stats", str(tmp_path / "nowhere")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_turns_without_times_are_spaced_when_they_are_converted(tmp_path, capsys):
    lines(tmp_path / "s1.jsonl", [body("q"), body("q", "a", "b")])
    assert main(["trace", "convert", str(tmp_path), "--to", str(tmp_path / "out"), "--gap", "3"]) == 0
    (session,) = read(tmp_path / "out")
    assert [r.start_s for r in session.agents[0].requests] == [0.0, 3.0]
