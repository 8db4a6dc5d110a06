"""A real engine over a store with faults: no request hangs, and each answers as the reference does."""

import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.engines import Engine, EngineFailure, note
from bench.fault_cases import CASES, Bed, Case
from model.reference import ReferenceModel

PAGE_TOKENS = 64
ANSWER_TOKENS = 6
CONCURRENCY = 8
PROMPTS = 12
# Two logits this close may swap places between two orders of the same sum in float32.
NEAR_TIE = 1e-3
HUNG_S = 60.0
_IDS = 200
_SETTLE_S = 0.4
_RECOVERY_LIMIT_S = 60.0
_FLUSH_LIMIT_S = 20.0


@dataclass(slots=True)
class Wave:
    """Requests that were sent under one fault."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    near_ties: int = 0
    hung: int = 0
    failed: int = 0
    storage_tokens: int = 0


class EngineFaults:
    """Plays cases against one engine, whose threads have to live through all of them."""

    def __init__(self, engine: Engine, model: Path, bed: Bed) -> None:
        self._engine = engine
        self._bed = bed
        source = random.Random(11)
        # Some share their beginning, as turns of a session do.
        stem = [source.randrange(_IDS) for _ in range(3 * PAGE_TOKENS)]
        self._prompts = [
            stem[: source.choice((0, PAGE_TOKENS, 3 * PAGE_TOKENS))]
            + [source.randrange(_IDS) for _ in range(source.randrange(70, 260))]
            for _ in range(PROMPTS)
        ]
        reference = ReferenceModel.load(model)
        self._expected = [reference.greedy(tuple(prompt), ANSWER_TOKENS) for prompt in self._prompts]
        self._source = source
        self._fresh = 0

    def prepare(self) -> None:
        """See that the store works without faults; raises `EngineFailure`."""
        if not self._works():
            raise EngineFailure("the engine restores nothing from a store without faults")

    def play(self, case: Case, requests: int) -> tuple[Wave, dict[str, int], bool]:
        """Send requests under the fault.

        Returns them, the errors counted, and whether everything works again.
        """
        # What the case before left of the store is made whole: only what is there can be read under a fault.
        self._flush()
        self._send(range(PROMPTS))
        time.sleep(_SETTLE_S)
        self._flush()
        before = self.errors()
        with case.during(self._bed):
            wave = self.wave(requests)
        works = self._works()
        after = self.errors()
        return wave, {k: n - before.get(k, 0) for k, n in after.items() if n > before.get(k, 0)}, works

    def wave(self, requests: int) -> Wave:
        """Send `requests`, some at a time."""
        return self._send([self._source.randrange(PROMPTS) for _ in range(requests)])

    def _send(self, picks: Sequence[int]) -> Wave:
        wave = Wave()
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            for pick, (seconds, ids, storage) in zip(picks, pool.map(self._ask, picks), strict=True):
                if ids is None:
                    wave.hung += seconds >= HUNG_S
                    wave.failed += seconds < HUNG_S
                    continue
                wave.seconds.append(seconds)
                wave.storage_tokens += storage
                self._judge(wave, pick, ids)
        return wave

    def errors(self) -> dict[str, int]:
        """The store's errors so far, by kind, as the engine's metrics have them."""
        text = httpx.get(f"{self._engine.url}/metrics", timeout=HUNG_S).text
        counts: dict[str, int] = {}
        for kind, count in re.findall(
            r'^longhaul_store_errors_total{[^}]*kind="(\w+)"[^}]*} (\S+)$', text, re.M
        ):
            counts[kind] = counts.get(kind, 0) + int(float(count))
        return counts

    def _ask(self, pick: int) -> tuple[float, list[int] | None, int]:
        started = time.monotonic()
        body = {
            "input_ids": self._prompts[pick],
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
        }
        try:
            response = httpx.post(f"{self._engine.url}/generate", json=body, timeout=HUNG_S)
            answer = response.raise_for_status().json()
        except httpx.TimeoutException:
            return HUNG_S, None, 0
        except httpx.HTTPError as error:
            note(f"a request failed: {error}")
            return time.monotonic() - started, None, 0
        details: dict[str, int] = answer["meta_info"].get("cached_tokens_details") or {}
        return time.monotonic() - started, answer["output_ids"], int(details.get("storage") or 0)

    def _judge(self, wave: Wave, pick: int, ids: Sequence[int]) -> None:
        steps = self._expected[pick]
        if len(ids) != len(steps):
            wave.wrong += 1
            return
        parting = next((step for token, step in zip(ids, steps, strict=True) if token != step.token), None)
        if parting is not None:
            wave.wrong += parting.gap >= NEAR_TIE
            wave.near_ties += parting.gap < NEAR_TIE

    def _works(self) -> bool:
        """Whether a new prompt is written to the store, and read from it again.

        That takes every thread that the engine has for it: lookup, reading, writing, and those between them.
        """
        end = time.monotonic() + _RECOVERY_LIMIT_S
        while time.monotonic() < end:
            self._fresh += 1
            source = random.Random(1000 + self._fresh)
            ids = [source.randrange(_IDS) for _ in range(2 * PAGE_TOKENS + 9)]
            self._engine.generate(ids, 1)
            time.sleep(_SETTLE_S)
            self._flush()
            if self._engine.generate(ids, 1).tiers["storage"] >= PAGE_TOKENS:
                return True
        return False

    def _flush(self) -> None:
        self._engine.client.post("/flush_cache", params={"timeout": _FLUSH_LIMIT_S}).raise_for_status()


def measure(
    engine: Engine, model: Path, bed: Bed, requests: int, said: Callable[[str], None]
) -> dict[str, Any]:
    """Play all cases; returns the report."""
    faults = EngineFaults(engine, model, bed)
    faults.prepare()
    share = -(-requests // len(CASES))
    total, cases, near_ties = Wave(), {}, 0
    dead_s: list[float] = []
    usual_s: list[float] = []
    broken: list[str] = []
    unnamed: list[str] = []
    for case in CASES:
        wave, errors, works = faults.play(case, share)
        total.seconds += wave.seconds
        total.wrong += wave.wrong
        total.hung += wave.hung
        total.failed += wave.failed
        near_ties += wave.near_ties
        (dead_s if case.is_dead else usual_s).extend(wave.seconds)
        if not works:
            broken.append(case.name)
        if case.kinds and not case.kinds & errors.keys():
            unnamed.append(case.name)
        cases[case.name] = {
            "requests": len(wave.seconds),
            "storage_tokens": wave.storage_tokens,
            "median_ms": round(1000 * statistics.median(wave.seconds)),
            "slowest_ms": round(1000 * max(wave.seconds)),
            "errors": errors,
        }
        said(f"engine, {case.name}: {cases[case.name]}, works again: {works}")
    return {
        "requests": len(total.seconds),
        "wrong_outputs": total.wrong,
        "near_ties": near_ties,
        "hung_requests": total.hung,
        "failed_requests": total.failed,
        "unrecovered": broken,
        "unnamed": unnamed,
        "added_ms_p50": _added_ms(dead_s, usual_s, 50),
        "added_ms_p99": _added_ms(dead_s, usual_s, 99),
        "cases": cases,
    }


def _added_ms(seconds: Sequence[float], usual: Sequence[float], percentile: int) -> int:
    """By how much a percentile is larger than under those faults with which the store still answers."""
    high, low = (
        statistics.quantiles(some, n=100, method="inclusive")[percentile - 1] for some in (seconds, usual)
    )
    return round(1000 * (high - low))
