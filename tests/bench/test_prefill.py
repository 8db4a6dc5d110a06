"""The limit leaves nothing out, and rates count what they say."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from bench import prefill
from bench.bare_model import BareModel
from model.reference import ReferenceModel


def test_the_bare_operators_are_the_whole_model(checkpoint: Path) -> None:
    bare, reference = BareModel.load(checkpoint), ReferenceModel.load(checkpoint)
    for length in (1, 65, 130):
        ids = torch.randint(0, 2000, (length,), generator=torch.Generator().manual_seed(length))
        want = reference.logits(ids.tolist())[-1]
        torch.testing.assert_close(bare.prefill(ids), want, atol=2e-4, rtol=0)


class Clock:
    """A clock that moves one second with every chunk that the endpoint sends."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(prefill.time, "perf_counter", clock)
    return clock


class Chunks(httpx.SyncByteStream):
    def __init__(self, clock: Clock, counts: list[int]) -> None:
        self._clock, self._counts = clock, counts

    def __iter__(self) -> Iterator[bytes]:
        for count in self._counts:
            self._clock.now += 1.0
            yield f"data: {json.dumps({'meta_info': {'completion_tokens': count}})}\n\n".encode()
        yield b"data: [DONE]\n\n"


def test_decode_is_timed_from_the_first_token_to_the_last(clock: Clock) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["sampling_params"]["max_new_tokens"] == 7
        return httpx.Response(200, stream=Chunks(clock, [1, 2, 4, 7]))

    with httpx.Client(base_url="http://engine", transport=httpx.MockTransport(answer)) as client:
        assert prefill.decode_rate(client, [[5, 6]], 7) == pytest.approx(6 / 3)


def test_a_refused_request_is_an_error(clock: Clock) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(503))
    with (
        httpx.Client(base_url="http://engine", transport=transport) as client,
        pytest.raises(httpx.HTTPStatusError),
    ):
        prefill.decode_rate(client, [[5, 6]], 7)


def test_a_cached_prompt_isnt_taken_for_a_computed_one() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"meta_info": {"cached_tokens": 64}}))
    with (
        httpx.Client(base_url="http://engine", transport=transport) as client,
        pytest.raises(AssertionError, match="64 tokens of a new prompt came from a cache"),
    ):
        prefill.prefill_seconds(client, [1, 2])


@pytest.mark.parametrize("flag", ["--tokens", "--repeats", "--threads", "--decode-tokens"])
def test_counts_are_checked(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["prefill", flag, "0"])
    with pytest.raises(SystemExit):
        prefill.main()
    assert f"{flag} must be at least" in capsys.readouterr().err
