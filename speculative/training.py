"""Training of a DSpark draft on what its target writes, resumable.

First the target rolls out agent sessions at the serving temperature (`speculative.rollouts`), of all lengths
up to the longest that it serves; then blocks are trained at anchors among the tokens that it wrote. Every
length keeps its share of the batches from the first step to the last, so that proposals far into a session
are no rarer in training than near ones.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file

from model.tasks.lexicon import Split
from model.tokenizer import K3Tokenizer
from model.training import schedule
from model.training.weights import load
from speculative import draft, messages, plots
from speculative.acceptance import Tally, measure
from speculative.decoding import narrow
from speculative.draft import DraftConfig
from speculative.network import DraftNetwork
from speculative.objective import draw_anchors, objective, run_blocks
from speculative.rollouts import Pool, Rollouts, roller, rounds

_CLIP: Final = 1.0
_MOST_ANCHORS: Final = 512
"""Blocks a text at most: bounds the attention mask at 32,768 tokens."""
_LOG_STEPS: Final = 20

SHARES: Final[Mapping[int, float]] = {
    1024: 0.2,
    2048: 0.25,
    4096: 0.2,
    8192: 0.15,
    16384: 0.1,
    32768: 0.1,
}
"""Share of the batches by tokens of their texts."""

HELD_OUT: Final = ((1024, 32), (8192, 16), (24576, 12))
"""Tokens and number of the texts that the accept length is measured on."""

SIZES: Final[dict[str, Any]] = {
    "layers": 3,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    # Slow rotations: far positions look alike, so that an answer's draft does not depend on where it stands.
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}
"""Of the draft of the small K3, as fields of `DraftConfig`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does.

    It takes `minutes`, the first `rollout_minutes` of them for rollouts (at least a round of every length),
    or trains for `steps` batches when that is given. A batch has `tokens`, in texts whose last `rolled`
    tokens were rolled out, and `anchors` blocks for every 1,024 of them.
    """

    target: Path
    output: Path
    minutes: float = 8.0
    rollout_minutes: float = 2.0
    steps: int | None = None
    tokens: int = 65536
    shares: Mapping[int, float] = field(default_factory=lambda: dict(SHARES))
    rolled: int = 1024
    round_tokens: int = 2 << 20
    round_texts: int = 1024
    anchors: int = 64
    rate: float = 1e-3
    temperature: float = 1.0
    weights: Path | None = None
    """A draft to begin with."""
    seed: int = 0
    workers: int = 4
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    sizes: Mapping[str, Any] = field(default_factory=lambda: dict(SIZES))
    held_out: tuple[tuple[int, int], ...] = HELD_OUT
    save_seconds: float = 45.0

    def __post_init__(self) -> None:
        assert self.minutes > 0 and self.anchors > 0 and self.temperature > 0
        assert all(length % 64 == 0 and self.tokens % length == 0 for length in self.shares)


class Run:
    """The state of a run. One whose output holds a `state.pt` or `rollouts.npz` goes on from there."""

    def __init__(self, plan: Plan, note: Callable[[str], None]) -> None:
        self.plan = plan
        self.note = note
        self._began = time.monotonic()
        self.device = torch.device(plan.device)
        self.config = DraftConfig.of(plan.target, **plan.sizes)
        self.target = load(plan.target, plan.dtype)
        self.target.requires_grad_(False).to(self.device)
        narrow(self.target)
        self.tokenizer_json = (plan.target / "tokenizer.json").read_text(encoding="utf-8")
        self.network = DraftNetwork(self.config)
        if plan.weights is not None:
            initial = load_file(plan.weights / "model.safetensors")
        else:
            initial = draft.random_weights(self.config, plan.seed)
            initial["markov_head.markov_w2.weight"].mul_(0.1)  # begins as a small correction
        self.network.load_state_dict(initial)
        self.network.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), plan.rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step = 0
        self.rolled_seconds = 0.0
        self._before = 0.0
        self._most_anchors = dict.fromkeys(plan.shares, _MOST_ANCHORS)
        plan.output.mkdir(parents=True, exist_ok=True)
        self._state = plan.output / "state.pt"
        self._pool = plan.output / "rollouts.npz"
        self._log = plan.output / "log.jsonl"
        if self._state.is_file():
            self._resume()

    @property
    def seconds(self) -> float:
        """Spent so far, earlier calls included."""
        return self._before + time.monotonic() - self._began

    @property
    def progress(self) -> float:
        """Share of the training done."""
        if self.plan.steps is not None:
            return min(1.0, self.step / self.plan.steps)
        whole = max(1.0, self.plan.minutes * 60 - self.rolled_seconds)
        return min(1.0, (self.seconds - self.rolled_seconds) / whole)

    def train(self, report: Callable[[float, str], None]) -> dict[str, Any]:
        """Roll out, train, write the draft, measure it; `report` gets the share done and a line."""
        with roller(self.target, self.tokenizer_json, self.plan.workers, self.note) as source:
            pool = self._rollouts(source.roll)
            self._learn(pool, report)
            self.save()
            held_out: dict[str, Any] = {}
            for length, count in self.plan.held_out:
                rolled = min(self.plan.rolled, 512)
                texts = source.roll(
                    f"{self.plan.seed}", count, length, rolled, split=Split.HELD_OUT, temperature=0.0
                )
                held_out[str(length)] = self.measure(texts)
        result = {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "rolled_out_tokens": pool.written,
            "held_out": held_out,
        }
        self._write(**result)
        log = [json.loads(line) for line in self._log.read_text(encoding="utf-8").splitlines()]
        picture = plots.training(log, self.config.block_size)
        (self.plan.output / "training.svg").write_text(picture, encoding="utf-8")
        return result

    def measure(self, texts: Rollouts) -> dict[str, Any]:
        """Accept lengths on rollouts."""
        tokenizer = K3Tokenizer.from_json(self.tokenizer_json)
        tally = Tally()
        for row in range(len(texts.ids)):
            ids, written = texts.ids[row], texts.written[row]
            segments = messages.segments(tokenizer, ids, written)
            for found in measure(self.network, self.target, ids, written).rounds:
                tally.add(found, segments[found.at + 1])
        self.note(f"held out, {texts.ids.shape[1]} tokens: accept length {tally.length:.3f}")
        return tally.to_json()

    def save(self) -> None:
        """Write the draft, and all that the run needs to go on."""
        draft.save(self.plan.output, self.config, self.network.tensors())
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "rolled_seconds": self.rolled_seconds,
        }
        partial = self._state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._state)

    def _rollouts(self, roll: Callable[..., Rollouts]) -> Pool:
        plan = self.plan
        if self._pool.is_file():
            pool = Pool.load(self._pool)
            self.note(f"takes {pool.written} rolled out tokens of {self._pool}")
            return pool
        pool = Pool()
        # A long text after a short one: whenever the time is over, the lengths are balanced.
        ascending = sorted(plan.shares)
        order = [length for pair in zip(ascending, reversed(ascending), strict=True) for length in pair]
        order = list(dict.fromkeys(order))
        for number, (length, count) in enumerate(rounds(order, plan.round_tokens, plan.round_texts)):
            if number >= len(order) and self.seconds > plan.rollout_minutes * 60:
                break
            rolled = min(length, plan.rolled)
            pool.add(
                roll(
                    f"{plan.seed}/{number}", count, length, rolled, split=Split.TRAIN,
                    temperature=plan.temperature,
                )
            )  # fmt: skip
            pool.save(self._pool)
        self.rolled_seconds = self.seconds
        self._write(rolled_out_tokens=pool.written, seconds=round(self.seconds, 1))
        return pool

    def _learn(self, pool: Pool, report: Callable[[float, str], None]) -> None:
        saved = time.monotonic()
        lengths = sorted(pool.by_length.keys() & self.plan.shares.keys())
        weights = np.array([self.plan.shares[length] for length in lengths])
        while (progress := self.progress) < 1:
            generator = np.random.default_rng((self.plan.seed, self.step))
            length = int(generator.choice(lengths, p=weights / weights.sum()))
            texts = pool.draw(generator, length, self.plan.tokens // length)
            try:
                figures = self._train_step(texts, progress)
            except torch.OutOfMemoryError:
                if self._most_anchors[length] <= 8:
                    raise
                self._most_anchors[length] //= 2
                self.optimizer.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                self.note(f"out of memory: {self._most_anchors[length]} blocks a text of {length} tokens")
                continue
            self.step += 1
            if self.step % _LOG_STEPS == 0 or self.step == 1:
                self._write(
                    step=self.step, seconds=round(self.seconds, 1), progress=round(progress, 4),
                    length=length, **figures,
                )  # fmt: skip
                report(
                    progress,
                    f"step {self.step} loss {figures['loss']:.3f} "
                    f"length {figures['teacher_forced_length']:.2f} of {length} tokens",
                )
            if time.monotonic() - saved > self.plan.save_seconds:
                self.save()
                saved = time.monotonic()

    def _train_step(self, texts: Rollouts, progress: float) -> dict[str, float]:
        plan = self.plan
        ids = torch.from_numpy(texts.ids.astype(np.int64)).to(self.device)
        written = torch.from_numpy(texts.written)
        wanted = plan.anchors * ids.shape[1] // 1024
        most = min(int(written.sum(1).max()), self._most_anchors[ids.shape[1]], wanted)
        # Keys are counted in eights by the fused attention kernels.
        count = min(max(8, most // 8 * 8), ids.shape[1])
        generator = torch.Generator().manual_seed(hash((plan.seed, self.step)))
        anchors = draw_anchors(written, count, generator).to(self.device)
        written = written.to(self.device)
        with torch.no_grad():
            last, taps = self.target(ids, self.config.target_layers)
        features = torch.cat(taps, -1).unflatten(0, ids.shape)
        with torch.autocast(self.device.type, plan.dtype, enabled=plan.dtype != torch.float32):
            blocks = run_blocks(self.network, self.target, ids, written, features, anchors)
        loss, figures = objective(
            blocks, anchors, self.target, last.unflatten(0, ids.shape), plan.temperature
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), _CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = plan.rate * schedule.scale(progress)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if figures["loss"] != figures["loss"]:
            raise FloatingPointError(f"the loss is no number at step {self.step}; lower --rate")
        return {name: round(value, 4) for name, value in figures.items()}

    def _resume(self) -> None:
        state = torch.load(self._state, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self._before = state["step"], state["seconds"]
        self.rolled_seconds = state["rolled_seconds"]
        self.note(f"goes on from step {self.step} of {self._state}")

    def _write(self, **values: Any) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(values) + "\n")
