"""What a target writes in sessions: drawn from it alone, answered by its session, read as it wrote it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model import small
from model.encoding import generation_segments, messages_segments
from model.tasks.lexicon import Split
from model.tokenizer import K3Tokenizer
from model.training import documents
from model.training.documents import Encoder, Kind
from model.training.geometry import Geometry
from model.training.network import Network
from model.training.weights import from_checkpoint, read
from speculative import messages
from speculative.decoding import Decoder, narrow
from speculative.players import Player, Request
from speculative.rollouts import Pool, Roller, Rollouts, roller


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    return K3Tokenizer.load(small.SHIPPED)


@pytest.fixture(scope="module")
def target() -> Network:
    config = json.loads((small.SHIPPED / "config.json").read_text())
    network = Network(Geometry.of(config))
    from_checkpoint(network, read(small.SHIPPED))
    narrow(network.requires_grad_(False))
    return network


def greedy(target: Network, ids: torch.Tensor) -> torch.Tensor:
    """The likeliest token behind each."""
    return target.lm_head(target(ids[None])[0]).argmax(-1)


@pytest.mark.slow
def test_a_step_is_what_the_whole_text_says(target: Network, tokenizer: K3Tokenizer) -> None:
    """Given tokens are followed, then the target's own are drawn; a sequence that waits stands still."""
    ids, _ = documents.batch(0, 0, 192, 384, Encoder(tokenizer))
    decoder = Decoder(target, 2, 192, 0.0, tokenizer.eos_ids)
    decoder.begin([ids[0, :130].tolist(), ids[1, :100].tolist()], 64)
    for _ in range(70):
        decoder.step()
    assert decoder.known[0] > 130 and decoder.known[1] > 100
    for row, given in enumerate((130, 100)):
        known = int(decoder.known[row])
        assert decoder.text[row, :given].tolist() == ids[row, :given].tolist()
        assert decoder.written[row].nonzero().flatten().tolist() == list(range(given, known))
        expected = greedy(target, decoder.text[row])[given - 1 : known - 1]
        assert decoder.text[row, given:known].equal(expected)
    decoder.is_waiting[0] = True
    before = int(decoder.at[0])
    for _ in range(5):
        decoder.step()
    assert int(decoder.at[0]) == before
    decoder.give({0: [7, 8, 9]})
    for _ in range(8):
        decoder.step()
    known = int(decoder.known[0])
    text = decoder.text[0]
    last = before + 1 if before + 1 == int(decoder.known[0]) else known
    assert text[known - 1] == greedy(target, text)[known - 2] and last <= known


@pytest.fixture(scope="module")
def source(target: Network):
    vocabulary = (small.SHIPPED / "tokenizer.json").read_text()
    with roller(target, vocabulary, 1, lambda _: None) as made:
        yield made


@pytest.mark.slow
def test_sessions_go_on_by_what_the_target_wrote(
    source: Roller, target: Network, tokenizer: K3Tokenizer
) -> None:
    texts = source.roll("1", 1, 768, 192, split=Split.HELD_OUT, temperature=0.0)
    assert texts.ids.shape == (1, 768)
    for row in range(1):
        written = np.flatnonzero(texts.written[row])
        assert written.min() >= 576 and len(written) > 30
        ids = torch.from_numpy(texts.ids[row].astype(np.int64))
        assert ids[written].equal(greedy(target, ids)[written - 1])
        segments = messages.segments(tokenizer, texts.ids[row], texts.written[row])
        assert [bool(segment) for segment in segments] == texts.written[row].tolist()
        assert {"thinking", "prose", "copied"} <= {name for segment in segments for name in segment}


def test_a_message_is_read_as_it_was_encoded(tokenizer: K3Tokenizer) -> None:
    calls: list[dict[str, Any]] = [
        {"id": "call_3", "type": "function", "function": {"name": "edit", "arguments": json.dumps(given)}}
        for given in ({"path": "a.py", "old": 'x = "1"', "new": "x = 2"}, {"n": 3})
    ]
    sent = {"role": "assistant", "reasoning_content": "I edit.", "content": "", "tool_calls": calls}
    ids = tokenizer.encode_segments(messages_segments([sent]))[
        len(tokenizer.encode_segments(generation_segments())) :
    ]
    found = messages.read(tokenizer, ids, 3)
    assert [call["id"] for call in found.calls] == ["call_3", "call_4"]
    assert [call["function"]["name"] for call in found.calls] == ["edit", "edit"]
    assert [json.loads(call["function"]["arguments"]) for call in found.calls] == [
        json.loads(call["function"]["arguments"]) for call in calls
    ]
    assert len(found.kinds) == len(ids)
    arguments = [token for token, kind in zip(ids, found.kinds, strict=True) if kind is Kind.ARGUMENT]
    assert tokenizer.decode(arguments) == 'a.pyx = "1"x = 23'


def test_calls_are_answered_by_the_session(tokenizer: K3Tokenizer) -> None:
    encoder = Encoder(tokenizer)
    player = Player(Request("4", Split.TRAIN, 600), tokenizer, encoder)
    assert len(player.prompt) > 600
    call = {"id": "c", "type": "function", "function": {"name": "nothing", "arguments": "{}"}}
    sent = {"role": "assistant", "reasoning_content": "So.", "content": "", "tool_calls": [call]}
    ids = tokenizer.encode_segments(messages_segments([sent]))[
        len(tokenizer.encode_segments(generation_segments())) :
    ]
    assert "error: no tool named nothing" in tokenizer.decode(player.answer(ids))
    assert 'role="user"' in tokenizer.decode(player.answer(tokenizer.encode_text("So.")))


def test_rollouts_are_kept(tmp_path: Path) -> None:
    pool = Pool()
    for first in (0, 10):
        ids = np.arange(first, first + 6, dtype=np.int16).reshape(2, 3)
        pool.add(Rollouts(ids, ids % 2 == 0))
    pool.save(tmp_path / "pool.npz")
    found = Pool.load(tmp_path / "pool.npz")
    assert found.by_length[3].ids.tolist() == pool.by_length[3].ids.tolist()
    assert found.written == pool.written == 6
    drawn = found.draw(np.random.default_rng(0), 3, 4)
    assert sorted(drawn.ids[:, 0].tolist()) == [0, 3, 10, 13]
