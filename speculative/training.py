"""Training of a DSpark draft for a K3 whose training data are at hand, resumable.

The small K3 has learnt the sessions of `model.tasks` to the last token but for what nothing determines, so
that their text is what it writes itself at temperature 1. Blocks begin where the assistant writes.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from model.tasks.lexicon import Split
from model.tokenizer import K3Tokenizer
from model.training import documents, schedule
from model.training.documents import WRITTEN
from model.training.feed import Feed
from model.training.geometry import Geometry
from model.training.measure import to_device
from model.training.network import Network
from model.training.weights import from_checkpoint, read
from speculative import draft
from speculative.acceptance import Tally, measure
from speculative.draft import DraftConfig
from speculative.network import DraftNetwork
from speculative.objective import draw_anchors, objective, run_blocks

_AHEAD: Final = 24
_CLIP: Final = 1.0
_HELD_OUT: Final = ((1024, 16), (8192, 2), (24576, 1))
"""Tokens and number of the texts that the accept length is measured on."""

SIZES: Final[dict[str, Any]] = {
    "layers": 3,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    # Slow rotations: far positions look alike, so that an answer's draft does not depend on where it stands.
    "rope_theta": 1e6,
}
"""Of the draft of the small K3, as fields of `DraftConfig`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does: `steps` batches of `tokens`, `anchors` blocks for every 1,024 of them."""

    target: Path
    output: Path
    steps: int = 2000
    tokens: int = 65536
    longest: int = 32768
    anchors: int = 64
    rate: float = 1e-3
    temperature: float = 1.0
    seed: int = 0
    workers: int = 4
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    sizes: dict[str, Any] = field(default_factory=lambda: dict(SIZES))
    held_out: tuple[tuple[int, int], ...] = _HELD_OUT
    save_seconds: float = 60.0

    def __post_init__(self) -> None:
        assert self.steps > 0 and self.anchors > 0 and self.temperature > 0
        assert self.tokens >= self.longest and self.longest % 64 == 0, "a batch holds whole sequences"


class Run:
    """The state of a run. One whose output holds a `state.pt` goes on from there."""

    def __init__(self, plan: Plan, note: Callable[[str], None]) -> None:
        self.plan = plan
        self.note = note
        self.device = torch.device(plan.device)
        self.config = DraftConfig.of(plan.target, **plan.sizes)
        geometry = Geometry.of(json.loads((plan.target / "config.json").read_text(encoding="utf-8")))
        self.target = Network(geometry, plan.dtype)
        from_checkpoint(self.target, read(plan.target))
        self.target.requires_grad_(False).to(self.device)
        self.tokenizer_json = (plan.target / "tokenizer.json").read_text(encoding="utf-8")
        self.network = DraftNetwork(self.config)
        initial = draft.random_weights(self.config, plan.seed)
        initial["markov_head.markov_w2.weight"].mul_(0.1)  # begins as a small correction
        self.network.load_state_dict(initial)
        self.network.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), plan.rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step = 0
        self.seconds = 0.0
        self._state = plan.output / "state.pt"
        if self._state.is_file():
            self._resume()
        plan.output.mkdir(parents=True, exist_ok=True)
        self._log = plan.output / "log.jsonl"

    def train(self, report: Callable[[float, str], None]) -> dict[str, Any]:
        """Train to the end, write the draft, measure it; `report` gets the share done and a line."""
        plan = self.plan
        feed = Feed(self.tokenizer_json, plan.seed, plan.tokens, plan.workers)
        began, before = time.monotonic(), self.seconds
        saved = began
        try:
            for index in range(self.step, min(plan.steps, self.step + _AHEAD)):
                feed.request(index, self._length(index))
            while self.step < plan.steps:
                batch = feed.take(self.step)
                if self.step + _AHEAD < plan.steps:
                    feed.request(self.step + _AHEAD, self._length(self.step + _AHEAD))
                ids, _, _ = to_device(batch, self.device)
                kinds = torch.from_numpy(batch.kinds[:, :-1].astype("int64"))
                written = torch.isin(kinds, torch.tensor([int(kind) for kind in WRITTEN]))
                figures = self._train_step(ids, written)
                self.step += 1
                self.seconds = before + time.monotonic() - began
                if self.step % 20 == 0 or self.step == plan.steps:
                    self._write(
                        step=self.step, seconds=round(self.seconds, 1), length=ids.shape[1], **figures
                    )
                    report(
                        self.step / plan.steps,
                        f"step {self.step} loss {figures['loss']:.3f} "
                        f"length {figures['teacher_forced_length']:.2f}",
                    )
                if time.monotonic() - saved > plan.save_seconds:
                    self.save()
                    saved = time.monotonic()
        finally:
            feed.close()
        self.save()
        draft.save(plan.output, self.config, self.network.tensors())
        result = {"step": self.step, "seconds": round(self.seconds, 1), "held_out": self.measure()}
        self._write(**result)
        return result

    def measure(self) -> dict[str, Any]:
        """Accept lengths on held-out sessions, by tokens of context."""
        encoder = documents.Encoder(K3Tokenizer.from_json(self.tokenizer_json))
        found: dict[str, Any] = {}
        for length, count in self.plan.held_out:
            ids, kinds = documents.batch(self.plan.seed, 0, length, length * count, encoder, Split.HELD_OUT)
            tally = Tally()
            for row in range(count):
                measure(self.network, self.target, ids[row, :-1], kinds[row, :-1], tally)
            found[str(length)] = tally.to_json()
            self.note(f"held out, {length} tokens: accept length {tally.length:.2f}")
        return found

    def save(self) -> None:
        """Write all that the run needs to go on."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        partial = self._state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._state)

    def _train_step(self, ids: Tensor, written: Tensor) -> dict[str, float]:
        plan = self.plan
        count = max(1, plan.anchors * ids.shape[1] // 1024)
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
            group["lr"] = plan.rate * schedule.scale(self.step / plan.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if figures["loss"] != figures["loss"]:
            raise FloatingPointError(f"the loss is no number at step {self.step}; lower --rate")
        return {name: round(value, 4) for name, value in figures.items()}

    def _length(self, index: int) -> int:
        return schedule.length(self.plan.seed, index, index / self.plan.steps, self.plan.longest)

    def _resume(self) -> None:
        state = torch.load(self._state, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.note(f"goes on from step {self.step} of {self._state}")

    def _write(self, **values: Any) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(values) + "\n")
