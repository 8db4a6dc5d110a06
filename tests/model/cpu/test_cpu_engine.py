"""The unmodified SGLang on the CPU platform against the float32 reference."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.engines import Answer, Engine, running_engine
from model.reference import ReferenceModel, Step
from model.vocabulary import TEXT_TOKENS
from speculative import draft

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

PAGE = 64
ANSWER = 8
NEAR_TIE = 1e-3
# Around the borders of pages and chunks, and far beyond them.
LENGTHS = (1, 3, 16, 63, 64, 65, 127, 128, 129, 300, 1000)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> ReferenceModel:
    return ReferenceModel.load(checkpoint)


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(f"{seed} {length}")
    return [source.randrange(TEXT_TOKENS) for _ in range(length)]


def assert_follows(answer: Sequence[int], steps: Sequence[Step]) -> None:
    """The answer is the reference's, up to a place where two tokens are as good as equal."""
    assert len(answer) == len(steps)
    pairs = zip(answer, steps, strict=True)
    parting = next((step for token, step in pairs if token != step.token), None)
    assert parting is None or parting.gap < NEAR_TIE, f"the reference is sure by {parting.gap}"


def logprobs(engine: Engine, ids: Sequence[int]) -> tuple[Answer, list[float]]:
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True},
        "return_logprob": True,
    }
    found = engine.client.post("/generate", json=body).json()
    values = [float(entry[0]) for entry in found["meta_info"]["output_token_logprobs"]]
    return Answer(found["output_ids"], found["meta_info"]), values


@pytest.mark.parametrize("length", LENGTHS)
def test_output_and_logprobs_equal_the_reference(
    engine: Engine, reference: ReferenceModel, length: int
) -> None:
    ids = prompt(length)
    steps = reference.greedy(ids, ANSWER)
    computed, first = logprobs(engine, ids)
    assert computed.cached_tokens == 0
    again, second = logprobs(engine, ids)
    # The last token is computed in any case. Prefill snapshots one state, at its last page border: when the
    # prompt ends there, it lies behind that token and is of no use to the same prompt.
    assert again.cached_tokens == (length // PAGE * PAGE if length % PAGE else 0)
    for answer, values in ((computed, first), (again, second)):
        assert_follows(answer.ids, steps)
        for token, value, step in zip(answer.ids, values, steps, strict=True):
            if token != step.token:
                break
            assert value == pytest.approx(step.logprob, abs=2e-4)


def test_a_batch_answers_as_each_request_alone(engine: Engine, reference: ReferenceModel) -> None:
    prompts = [prompt(length, seed=1) for length in (5, 70, 130, 257, 64, 1, 400, 33)]
    engine.flush()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: engine.generate(ids, 24), prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        assert_follows(answer.ids, reference.greedy(ids, 24))


def test_the_host_tier_and_a_file_store_restore(
    checkpoint: Path, reference: ReferenceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under pressure pages come back from the host, after a restart from the files, with the same output.

    In the layout that the profile does not use: `tests/cache_store/test_restore.py` has the other one.
    """
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    extra = [
        "--enable-hierarchical-cache",
        *("--hicache-size", "1", "--hicache-write-policy", "write_through"),
        *("--hicache-io-backend", "kernel", "--hicache-mem-layout", "page_first"),
        *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 64}'),
        *("--max-total-tokens", "2048", "--max-mamba-cache-size", "48"),
    ]
    ids = prompt(700, seed=2)
    steps = reference.greedy(ids, ANSWER)
    with running_engine(checkpoint, tmp_path / "first.log", extra=extra) as engine:
        assert_follows(engine.generate(ids, ANSWER).ids, steps)
        for seed in range(3, 8):
            engine.generate(prompt(600, seed=seed), 1)
        returned = engine.generate(ids, ANSWER)
        assert_follows(returned.ids, steps)
        assert returned.tiers["host"] + returned.tiers["storage"] >= 640, returned.meta
    with running_engine(checkpoint, tmp_path / "second.log", extra=extra) as engine:
        restored = engine.generate(ids, ANSWER)
        assert_follows(restored.ids, steps)
        assert restored.tiers["storage"] >= 640, restored.meta


def test_a_draft_changes_nothing_but_speed(
    checkpoint: Path, reference: ReferenceModel, tmp_path: Path
) -> None:
    """Greedy output of a random draft equals the reference; sampled output comes with any temperature."""
    draft_path = tmp_path / "draft"
    draft.build(draft_path, checkpoint)
    with running_engine(checkpoint, tmp_path / "engine.log", draft=draft_path) as engine:
        for length in (3, 64, 65, 300):
            ids = prompt(length, seed=9)
            steps = reference.greedy(ids, 40)
            for _ in range(2):
                answer = engine.generate(ids, 40)
                assert_follows(answer.ids, steps)
                assert int(answer.meta["spec_verify_ct"]) > 0
        with ThreadPoolExecutor(4) as pool:
            sampled = list(
                pool.map(
                    lambda seed: engine.generate(prompt(100, seed), 40, temperature=1.0, top_p=0.9), range(4)
                )
            )
        assert all(len(answer.ids) == 40 for answer in sampled)
