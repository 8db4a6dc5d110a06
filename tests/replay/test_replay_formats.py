import json
from pathlib import Path

import pytest

from replay.errors import TraceError
from replay.formats import read_sessions
from replay.trace import Session


def read(path: Path) -> Session:
    (session,) = read_sessions([path])
    return session


def write(folder: Path, document, name="trace.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def request(t, tokens, blocks, **values):
    return {"t": t, "type": "n", "in": tokens, "out": 5, "hash_ids": blocks, **values}


def trace(*requests, **values):
    return {"id": "made", "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **values}


def test_reads_a_recorded_session(traces):
    session = read(traces / "trace_0460.json")
    (agent,) = session.agents
    assert (session.name, session.block_tokens, session.shared_blocks) == ("trace_0460", 64, False)
    assert agent.head_tokens == 8315 + 699
    assert len(agent.requests) == 12
    assert (agent.requests[0].input_tokens, agent.requests[0].output_tokens) == (11729, 163)
    assert all(len(request.blocks) == request.input_tokens // 64 for request in agent.requests)


def test_reads_sub_agents_beside_their_parent(traces):
    root, first, second = read(traces / "trace_0291_cut.json").agents
    assert (first.parent, first.spawned_after, first.joined_before) == (0, 3, 4)
    assert (second.parent, second.spawned_after, second.joined_before) == (0, 3, 5)
    assert first.start_s == 1148.013
    assert first.requests[1].start_s == pytest.approx(1148.013 + 5.0)
    assert first.end_s == pytest.approx(1148.013 + 46.656)
    assert root.head_tokens != first.head_tokens == 7401 + 1465


def test_absolute_and_relative_times_are_the_same_session(traces, tmp_path):
    document = json.loads((traces / "trace_0291_cut.json").read_text())
    for entry in document["requests"]:
        for inner in entry.get("requests", ()):
            inner["t"] += entry["t"]
    absolute = read(write(tmp_path, document))
    relative = read(traces / "trace_0291_cut.json")
    for left, right in zip(absolute.agents, relative.agents, strict=True):
        assert [request.start_s for request in left.requests] == pytest.approx(
            [request.start_s for request in right.requests]
        )
        assert (left.spawned_after, left.joined_before) == (right.spawned_after, right.joined_before)


def test_a_long_sub_agent_stays_relative_after_its_own_start(tmp_path):
    inner = {"t": 10.0, "type": "subagent", "requests": [request(0, 64, [9]), request(30, 128, [9, 8])]}
    _, child = read(write(tmp_path, trace(request(0, 64, [1]), inner))).agents
    assert [each.start_s for each in child.requests] == [10.0, 40.0]


def test_nested_sub_agents_and_one_that_nobody_waits_for(tmp_path):
    innermost = {"t": 2.0, "type": "subagent", "agent_id": "b", "requests": [request(0, 64, [7])]}
    outer = {
        "t": 5.0,
        "type": "subagent",
        "agent_id": "a",
        "duration_ms": 9000,
        "requests": [request(0, 64, [9]), innermost, request(4, 128, [9, 8])],
    }
    session = read(write(tmp_path, trace(request(0, 64, [1]), outer, request(6, 128, [1, 2]))))
    root, a, b = session.agents
    assert [agent.name for agent in session.agents] == ["root", "a", "b"]
    assert (a.parent, a.spawned_after, a.joined_before) == (
        0,
        0,
        None,
    )  # ends at 14, after the root's last
    assert (b.parent, b.spawned_after, b.joined_before) == (1, 0, 1)
    assert b.requests[0].start_s == 7.0
    assert session.turns == 5 and len(root.requests) == 2


def test_a_recorder_may_give_the_partial_block_an_id_or_leave_blocks_out(tmp_path):
    session = read(write(tmp_path, trace(request(0, 130, [1, 2, 3]), request(1, 640, [1]))))
    assert [each.blocks for each in session.agents[0].requests] == [(1, 2), (1,)]


def test_reads_lines_and_folders_in_order(tmp_path):
    lines = "\n".join(json.dumps(trace(request(0, 64, [1]), id=name)) for name in ("x", "y"))
    (tmp_path / "b.jsonl").write_text(lines + "\n\n")
    write(tmp_path, trace(request(0, 64, [1]), id="w"), "a.json")
    (tmp_path / "readme.txt").write_text("no trace")
    assert [session.name for session in read_sessions([tmp_path])] == ["w", "x", "y"]


def test_global_hash_ids_are_shared(tmp_path):
    assert read(write(tmp_path, trace(request(0, 64, [1]), hash_id_scope="global"))).shared_blocks


@pytest.mark.parametrize(
    ("document", "where", "problem"),
    [
        (trace(request(0, "many", [1])), "requests[0].in", "integer"),
        (trace(request(0, 0, [])), "requests[0].in", "at least 1"),
        (trace(request(0, 64, [1]), request(None, 64, [1])), "requests[1].t", "seconds"),
        (trace(request(0, 64, [1, "x"])), "requests[0].hash_ids[1]", "integer"),
        (trace(request(0, 64, [1], api_time="soon")), "requests[0].api_time", "seconds"),
        (trace({"t": 0, "type": "other"}), "requests[0].type", "subagent"),
        (trace(7), "requests[0]", "object"),
        (
            trace(request(0, 64, [1]), {"t": 1, "type": "subagent", "requests": [request(0, -1, [])]}),
            "requests[1].requests[0].in",
            "at least 1",
        ),
        (trace({"t": 1, "type": "subagent"}), "requests[0].requests", "list"),
        (trace(request(0, 64, [1]), block_size=0), "block_size", "at least 1"),
        (trace(request(0, 64, [1]), hash_id_scope="galactic"), "hash_id_scope", "local or global"),
        (trace(), "requests", "no model call"),
        ({"something": "else"}, "", "no format"),
    ],
)
def test_errors_name_the_file_the_entry_and_the_field(document, where, problem, tmp_path):
    path = write(tmp_path, document)
    with pytest.raises(TraceError) as caught:
        read(path)
    assert caught.value.where == where
    assert str(path) in str(caught.value) and problem in caught.value.problem


def test_errors_of_files(tmp_path):
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps(trace(request(0, 64, [1]))) + "\nnot json\n")
    for path, problem in [
        (tmp_path / "nowhere", "no such file"),
        (tmp_path / "empty", "no .json"),
        (broken, "is not JSON"),
        (lines, "line 2: is not JSON"),
    ]:
        with pytest.raises(TraceError, match=problem):
            list(read_sessions([path]))


def test_the_first_turns_keep_only_the_agents_that_they_spawn(traces):
    session = read(traces / "trace_0291_cut.json")
    assert [len(agent.requests) for agent in session.first_turns(4).agents] == [4, 3, 3]
    assert [agent.joined_before for agent in session.first_turns(5).agents] == [None, 4, None]
    assert [len(agent.requests) for agent in session.first_turns(3).agents] == [3]
