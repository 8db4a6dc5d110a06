"""How far a draft's confidence can be trusted, and how fast the machine verifies.

Sequential temperature scaling (DSpark, arXiv 2607.05147, section on calibration): from the first position of
a block to the last, the temperature is sought with which the product of the confidences so far is best
calibrated: has the least expected calibration error (ECE) against how often so many tokens were accepted.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model.encoding import generation_segments, head_segments, messages_segments
from speculative import plots
from speculative.acceptance import everywhere, measure
from speculative.evaluation import Stretch, play_stretch
from speculative.pair import Pair
from speculative.served import Engine, running

SESSIONS: Final = Stretch(1024, 8, 8)
_BINS: Final = 15
_TEMPERATURES: Final = np.geomspace(0.2, 5.0, 97)
_PROBED: Final = (1, 2, 4, 8)
_PROBE_TOKENS: Final = (16, 96)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Of N blocks: `logits` [N, block] of the confidence head, `accepted` [N] how many tokens were accepted,
    and `countable` [N] how many positions lay within the message (those behind its end tell nothing)."""

    logits: NDArray[np.float64]
    accepted: NDArray[np.int64]
    countable: NDArray[np.int64]

    def __post_init__(self) -> None:
        assert len(self.logits) == len(self.accepted) == len(self.countable)
        assert (self.accepted <= self.countable).all()

    def at(self, position: int, logits: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Chance, by the (scaled) logits, that all tokens up to a position are accepted, and whether they
        were; of the blocks that have it."""
        counted = self.countable > position
        chance = np.prod(1 / (1 + np.exp(-logits[counted, : position + 1].clip(-50, 50))), axis=1)
        return chance, self.accepted[counted] > position


def error(chance: NDArray[np.float64], happened: NDArray[np.bool_]) -> float:
    """Expected calibration error over fifteen bins of equal width."""
    bins = np.minimum((chance * _BINS).astype(int), _BINS - 1)
    weights = np.bincount(bins, minlength=_BINS)
    gaps = np.bincount(bins, chance, _BINS) - np.bincount(bins, happened.astype(float), _BINS)
    return float(np.abs(gaps).sum() / max(1, weights.sum()))


def fit(outcomes: Outcomes) -> NDArray[np.float64]:
    """A temperature for each position, from left to right."""
    found = np.ones(outcomes.logits.shape[1])
    for position in range(len(found)):
        errors: list[float] = []
        for temperature in _TEMPERATURES:
            found[position] = temperature
            errors.append(error(*outcomes.at(position, outcomes.logits / found)))
        found[position] = _TEMPERATURES[int(np.argmin(errors))]
    return found


def reliability(outcomes: Outcomes, temperatures: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Mean chance and observed share, bin by bin, over all positions."""
    pairs = [outcomes.at(position, outcomes.logits / temperatures) for position in range(len(temperatures))]
    chance = np.concatenate([pair[0] for pair in pairs])
    happened = np.concatenate([pair[1] for pair in pairs])
    bins = np.minimum((chance * _BINS).astype(int), _BINS - 1)
    return [
        (float(chance[bins == n].mean()), float(happened[bins == n].mean()))
        for n in range(_BINS)
        if (bins == n).sum() >= 10
    ]


def calibrate(
    target: Path, draft: Path, output: Path, note: Callable[[str], None], seed: int
) -> dict[str, Any]:
    """Play sessions on an engine with the draft, fit, measure, and write SGLang's two tables and a plot.

    Half of the sessions are fitted to, the other half is what the errors are of. Blocks behind every token of
    a message count, not only those that an engine would draft: a fit needs more than those. Raises
    `DraftError`.
    """
    pair = Pair.load(target, draft)
    with running(target, draft) as engine:
        played = play_stretch(engine, pair, SESSIONS, f"sts/{seed}", note)
        steps = _steps_per_second(engine, pair, note)
    outcomes = [_outcomes(pair, session.ids, session.written) for session in played]
    fitted, judged = _joined(outcomes[::2]), _joined(outcomes[1::2])
    temperatures = fit(fitted)
    ones = np.ones_like(temperatures)
    before, after = (
        [round(error(*judged.at(k, judged.logits / scale)), 4) for k in range(len(scale))]
        for scale in (ones, temperatures)
    )
    block = pair.draft.config.block_size
    sts = {
        "temperatures": [round(float(value), 4) for value in temperatures],
        "dataset": "agent sessions, greedy",
        "num_samples": len(fitted.accepted),
        "ece_before": before,
        "ece_after": after,
    }
    sps = {
        "sample_batch_tokens": [requests * (block + 1) for requests in steps],
        "sample_steps_per_sec": [round(value, 2) for value in steps.values()],
        "max_batch_tokens": max(steps) * (block + 1),
    }
    output.mkdir(parents=True, exist_ok=True)
    for name, content in (("sts.json", sts), ("sps.json", sps)):
        (output / name).write_text(json.dumps(content) + "\n", encoding="utf-8")
    curves = {"as trained": reliability(judged, ones), "scaled": reliability(judged, temperatures)}
    title = "Share of prefixes accepted, by the chance that the draft gave them"
    (output / "reliability.svg").write_text(
        plots.lines(title, ("predicted", "observed, held-out sessions"), curves, is_square=True),
        encoding="utf-8",
    )
    return {"path": str(output), "judged_blocks": len(judged.accepted), "sts": sts, "sps": sps}


def _outcomes(pair: Pair, ids: NDArray[Any], written: NDArray[np.bool_]) -> Outcomes:
    rounds = measure(pair.draft, pair.target, ids, written, everywhere).rounds
    return Outcomes(
        np.array([found.confidence for found in rounds]),
        np.array([found.accepted for found in rounds]),
        np.array([found.countable for found in rounds]),
    )


def _joined(parts: Sequence[Outcomes]) -> Outcomes:
    return Outcomes(
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.accepted for part in parts]),
        np.concatenate([part.countable for part in parts]),
    )


def _steps_per_second(engine: Engine, pair: Pair, note: Callable[[str], None]) -> dict[int, float]:
    """Blocks drafted and verified a second, with so many requests at once.

    From the difference of a long and a short answer, so that neither the prefill nor the request counts.
    """
    found: dict[int, float] = {}
    for requests in _PROBED:
        prompts = [_prompt(pair, n) for n in range(requests)]
        taken: list[tuple[int, float]] = []
        for tokens in (_PROBE_TOKENS[0], *_PROBE_TOKENS):  # the first fills the cache

            def one(prompt: list[int], tokens: int = tokens) -> int:
                return engine.generate(prompt, temperature=0, max_new_tokens=tokens, ignore_eos=True).rounds

            with ThreadPoolExecutor(requests) as pool:
                began = time.perf_counter()
                rounds = max(pool.map(one, prompts))
                taken.append((rounds, time.perf_counter() - began))
        (short, before), (long, after) = taken[1:]
        found[requests] = max(1, long - short) / max(1e-6, after - before)
        note(f"{requests} requests at once: {found[requests]:.1f} steps a second")
    return found


def _prompt(pair: Pair, number: int) -> list[int]:
    message = {"role": "user", "content": f"Repeat: {number} " + "olive silver basalt mountain " * 8}
    segments = [*head_segments(()), *messages_segments([message]), *generation_segments()]
    return pair.tokenizer.encode_segments(segments)


def show(result: dict[str, Any]) -> None:
    """Print tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    sts, sps = result["sts"], result["sps"]
    table = Table("position", "temperature", "error as trained", "scaled")
    table.title = f"calibration of prefixes, {result['judged_blocks']} held-out blocks"
    rows = zip(sts["temperatures"], sts["ece_before"], sts["ece_after"], strict=True)
    for position, (temperature, before, after) in enumerate(rows, 1):
        table.add_row(str(position), f"{temperature:.3f}", f"{before:.4f}", f"{after:.4f}")
    console.print(table)
    table = Table("verified tokens a step", "steps a second", title="speed of this machine")
    for tokens, steps in zip(sps["sample_batch_tokens"], sps["sample_steps_per_sec"], strict=True):
        table.add_row(str(tokens), str(steps))
    console.print(table)
    console.print(f"tables and plot: {result['path']}")
