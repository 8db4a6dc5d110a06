import asyncio
from pathlib import Path

import pytest

from bench.gateway import Bench, conversation
from bench.raw_client import RawClient
from bench.stub_engine import StubEngine, digest_script, prompt_digest, serving
from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "tokenizer.json").write_text(tokenizer_json())
    return path


def test_a_session_is_as_long_as_it_was_to_be(model: Path):
    tokenizer = K3Tokenizer.load(model)
    messages = conversation(tokenizer, 3000, 5)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 4 + ["user"]
    tokens = sum(len(tokenizer.encode_text(message["content"])) for message in messages)
    assert 2000 < tokens <= 3100


@pytest.mark.slow
def test_the_gateway_is_measured_where_it_continues(model: Path, tmp_path: Path):
    bench = Bench(model, tmp_path, None)
    with bench.servers():
        measured = asyncio.run(bench.first_byte(1200, 3))
        assert 0 < measured["engine_ms"] < measured["gateway_ms"]
        assert measured["prompt_tokens"] > measured["continued_tokens"] > 400
        rates = [asyncio.run(bench.rates(name, stream=True, seconds=0.5)) for name in ("direct", "longhaul")]
    assert rates[0] > rates[1] > 1


async def test_the_raw_client_reads_whole_and_chunked_answers(model: Path):
    tokenizer = K3Tokenizer.load(model)
    with serving(StubEngine(tokenizer, digest_script(tokenizer, 30), chunk=4)) as url:
        client = await RawClient.connect(url)
        for _ in range(2):
            answer = await client.post("/generate", {"input_ids": [1, 2], "stream": True})
            assert answer.status == 200
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert 0 < answer.first_s <= answer.whole_s
            answer = await client.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
            assert answer.body.startswith(b'{"tokens":[')
        await client.close()


def test_the_stub_names_its_prompt(model: Path):
    tokenizer = K3Tokenizer.load(model)
    script = digest_script(tokenizer, 40)
    for ids in ([1, 2, 3], [1, 2]):
        assert prompt_digest(ids) in tokenizer.decode(script({"input_ids": ids}))
