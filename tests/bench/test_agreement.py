"""How near an engine comes to the trainer's network, and that noise is taken for none of it."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from mocked_engine import mocked

from bench.agreement import Judge
from bench.engines import Engine, EngineFailure

PROMPTS = [list(range(7, 7 + 80)), list(range(300, 300 + 64))]


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_engine_gives_the_logits_of_the_trainers_network(engine: Engine, checkpoint: Path) -> None:
    found = Judge(checkpoint).compare(engine, PROMPTS)
    assert found["tokens"] == sum(map(len, PROMPTS)) - len(PROMPTS)
    assert found["engine"]["max_difference"] < 1e-3
    assert found["engine"]["likeliest_equal"] == 1.0
    # What stands beside it is of another type, and can be told from it.
    assert found["network_bfloat16"]["mean_difference"] > found["engine"]["mean_difference"]


def answering(logprob: float | None) -> Engine:
    """An engine that gives every token this log probability."""

    def answer(request: httpx.Request) -> httpx.Response:
        ids = json.loads(request.content)["input_ids"]
        written: list[Any] = [[None, ids[0], None], *([logprob, token, None] for token in ids[1:])]
        likeliest: list[Any] = [None, *([[logprob, token, None]] for token in ids[1:])]
        meta = {"input_token_logprobs": written, "input_top_logprobs": likeliest}
        return httpx.Response(200, json={"output_ids": [0], "meta_info": meta})

    return mocked(answer)


@pytest.mark.parametrize("logprob", [None, -100.0])
def test_noise_is_a_failure(checkpoint: Path, logprob: float | None) -> None:
    with pytest.raises(EngineFailure, match="not those of"):
        Judge(checkpoint).compare(answering(logprob), PROMPTS)


def test_an_answer_without_log_probabilities_is_named(checkpoint: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        meta = {"input_token_logprobs": [None], "input_top_logprobs": [None]}
        return httpx.Response(200, json={"output_ids": [0], "meta_info": meta})

    with pytest.raises(EngineFailure, match="0 log probabilities for 80 tokens"):
        Judge(checkpoint).compare(mocked(answer), PROMPTS)
