import json
from pathlib import Path
from typing import Any

import pytest

from service.errors import ContextTooLong, InvalidRequest
from service.fields import Fields
from service.sampling import Sampling, checkpoint_defaults, output_room, read_sampling

VOCABULARY = 2048


def read(body: dict[str, Any], defaults: dict[str, float] | None = None) -> Sampling:
    return read_sampling(Fields(body), defaults or {}, VOCABULARY)


def test_names_are_translated_and_defaults_filled_in():
    sampling = read(
        {"temperature": 0, "top_k": 0, "seed": 7, "logit_bias": {"5": -100}, "min_p": None},
        {"temperature": 0.6, "top_p": 0.95},
    )
    assert sampling.parameters == {
        "temperature": 0.0,
        "top_p": 0.95,
        "top_k": -1,
        "sampling_seed": 7,
        "logit_bias": {"5": -100.0},
    }


def test_the_newer_name_of_the_limit_wins_and_both_are_cut_to_what_fits():
    assert read({"max_tokens": 5, "max_completion_tokens": 1_048_576}).max_tokens == 1_048_576
    parameters = read({"max_completion_tokens": 1_048_576, "min_tokens": 500}).engine_parameters(100)
    assert parameters["max_new_tokens"] == parameters["min_new_tokens"] == 100
    assert read({}).engine_parameters(100)["max_new_tokens"] == 100
    assert read({"max_tokens": 3}).engine_parameters(100)["max_new_tokens"] == 3


def test_room_is_what_the_engine_grants():
    limits = {"max_prompt_tokens": 90, "max_request_tokens": 99, "context_tokens": 100}
    assert output_room(90, **limits) == 8
    with pytest.raises(ContextTooLong) as caught:
        output_room(91, **limits)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 100 tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"logit_bias": {"2048": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
    ],
)
def test_what_can_not_be_is_refused_by_name(body: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


def test_logprobs():
    assert read({}).top_logprobs is None
    assert read({"logprobs": False}).top_logprobs is None
    assert read({"logprobs": True}).top_logprobs == 0
    assert read({"logprobs": True, "top_logprobs": 4}).top_logprobs == 4


def test_defaults_come_from_the_checkpoint(tmp_path: Path):
    assert checkpoint_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text("[]")
    assert checkpoint_defaults(tmp_path) == {}
    path.write_text(json.dumps({"temperature": 1.0, "top_p": 0.95, "top_k": None, "eos_token_id": 5}))
    assert checkpoint_defaults(tmp_path) == {"temperature": 1.0, "top_p": 0.95}
