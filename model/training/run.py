"""One training run: batches in, weights out, resumable."""

import json
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from model.tasks.lexicon import Split
from model.tokenizer import K3Tokenizer
from model.training import checkpoint, documents, measure, schedule
from model.training.feed import Batch, Feed
from model.training.geometry import Geometry, small_config
from model.training.network import Network, initialise
from model.training.optimizer import Optimizer, Rates
from model.training.weights import from_checkpoint, read

_AHEAD: Final = 48
_FINISH_SECONDS: Final = 20.0
_COMPILE_SECONDS: Final = 210
_BALANCE_RATE: Final = 0.05
_HELD_OUT_LENGTHS: Final = (2048, 8192)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does. It ends after `steps`, or where that is None after `minutes` of training, or fewer
    when the whole run, compilation included, would otherwise take more than `wall_minutes`.

    `start` and `end` are the part of the schedule that this run covers. `weights` names a checkpoint to begin
    with. A run whose `output` holds a `state.pt` goes on from there.
    """

    output: Path
    seed: int = 0
    minutes: float = 13.0
    wall_minutes: float | None = None
    steps: int | None = None
    start: float = 0.0
    end: float = 1.0
    peak: float = 1.0
    tokens: int = 65536
    longest: int = 32768
    workers: int = 4
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    is_compiled: bool = True
    weights: Path | None = None
    sizes: dict[str, Any] = field(default_factory=dict[str, Any])
    rates: Rates = field(default_factory=Rates)
    save_seconds: float = 120.0
    held_out_seconds: float = 45.0
    keeps_state: bool = True

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.end <= 1, "a part of the schedule"
        assert self.tokens % self.longest == 0 or self.tokens >= self.longest, "a batch holds whole sequences"


class Run:
    """The state of a run."""

    def __init__(self, plan: Plan, tokenizer_json: str, note: Callable[[str], None]) -> None:
        self.plan = plan
        self.note = note
        self.device = torch.device(plan.device)
        self._began = time.monotonic()
        self._minutes = plan.minutes
        self.tokenizer_json = tokenizer_json
        self.config = small_config(**plan.sizes)
        self.geometry = Geometry.of(self.config)
        self.network = Network(self.geometry, plan.dtype)
        initialise(self.network, plan.seed)
        if plan.weights is not None:
            from_checkpoint(self.network, read(plan.weights))
        self.network.to(self.device)
        self.optimizer = Optimizer(self.network, plan.rates)
        self.step = 0
        self.tokens = 0
        self.trained_seconds = 0.0
        self._state = plan.output / "state.pt"
        if self._state.is_file():
            self._resume()
        plan.output.mkdir(parents=True, exist_ok=True)
        self._log = (plan.output / "log.jsonl").open("a", encoding="utf-8")
        self._held_out = self._draw_held_out()

    def progress(self) -> float:
        """How far the schedule is, 0 to 1."""
        plan = self.plan
        done = self.step / plan.steps if plan.steps else self.trained_seconds / (60 * self._minutes)
        return plan.start + (plan.end - plan.start) * min(1.0, done)

    def train(self, report: Callable[[float, str], None]) -> dict[str, Any]:
        """Train to the end of the plan and write the checkpoint; `report` gets the share done and a line."""
        plan, network = self.plan, self.network
        feed = Feed(self.tokenizer_json, plan.seed, plan.tokens, plan.workers)
        weights = measure.kind_weights(self.device)
        lengths: dict[int, int] = {}
        try:
            for index in range(self.step, self.step + _AHEAD):
                self._request(feed, index, lengths)
            first = feed.take(self.step)
            if plan.is_compiled:
                self._compile(first)
            if plan.wall_minutes is not None:
                left = 60 * plan.wall_minutes - (time.monotonic() - self._began) - _FINISH_SECONDS
                self._minutes = min(plan.minutes, (self.trained_seconds + max(1.0, left)) / 60)
                self.note(f"trains for {self._minutes:.1f} minutes in all")
            began = last_save = last_held_out = window = time.monotonic()
            before, window_tokens, window_flops = self.trained_seconds, self.tokens, 0.0
            batch: Batch | None = first
            while self.progress() < plan.end:
                progress = self.progress()
                if batch is None:
                    batch = feed.take(self.step)
                ids, targets, kinds = measure.to_device(batch, self.device)
                self._request(feed, self.step + _AHEAD, lengths)
                loss = measure.losses(network, ids, targets)
                weight = weights[kinds]
                total = (loss * weight).sum() / weight.sum()
                total.backward()
                self.optimizer.step(schedule.scale(progress) * plan.peak)
                network.balance(_BALANCE_RATE)
                self.step += 1
                self.tokens += ids.numel()
                window_flops += ids.numel() * measure.flops_per_token(network, self.geometry, ids.shape[1])
                if self.step % 50 == 0 or plan.steps is not None:
                    value = float(total.detach())
                    now = time.monotonic()
                    if value != value:
                        raise FloatingPointError(
                            f"the loss is no number at step {self.step}; lower the rates"
                        )
                    rate = (self.tokens - window_tokens) / (now - window)
                    self._write(
                        step=self.step,
                        seconds=round(self.trained_seconds, 1),
                        tokens=self.tokens,
                        length=ids.shape[1],
                        scale=round(schedule.scale(progress) * plan.peak, 4),
                        loss=round(value, 4),
                        kinds=measure.by_kind(loss.detach(), kinds),
                        tokens_per_second=round(rate),
                        mfu=round(window_flops / (now - window) / measure.H200_FLOPS, 4),
                        load=measure.moe_load(network),
                    )
                    report(
                        progress,
                        f"step {self.step} loss {value:.3f} {rate / 1e3:.0f}k tok/s T {ids.shape[1]}",
                    )
                    window, window_tokens, window_flops = time.monotonic(), self.tokens, 0.0
                batch = None
                now = time.monotonic()
                self.trained_seconds = before + now - began
                if now - last_held_out > plan.held_out_seconds:
                    self.measure_held_out()
                    last_held_out = window = time.monotonic()
                    window_tokens, window_flops = self.tokens, 0.0
                if plan.keeps_state and now - last_save > plan.save_seconds:
                    self.save()
                    last_save = time.monotonic()
        finally:
            feed.close()
        return self.finish()

    def finish(self) -> dict[str, Any]:
        """Round the weights as they are shipped, measure them, write the checkpoint."""
        tensors = checkpoint.rounded(self.network)
        from_checkpoint(self.network, tensors)
        result = self.measure_held_out()
        checkpoint.write(self.plan.output, self.config, tensors, self.tokenizer_json)
        if self.plan.keeps_state:
            self.save()
        return {"step": self.step, "tokens": self.tokens, "seconds": round(self.trained_seconds, 1), **result}

    def measure_held_out(self) -> dict[str, Any]:
        """Measure on held-out sessions and log it."""
        found = {
            str(length): measure.held_out(self.network, batches, self.device)
            for length, batches in self._held_out.items()
        }
        self._write(step=self.step, seconds=round(self.trained_seconds, 1), held_out=found)
        self.note(
            f"held out at step {self.step}: "
            + ", ".join(
                f"{length}: loss {r['loss']} messages {r['messages']} calls {r['call_messages']} "
                f"answers {r['answers']}"
                for length, r in found.items()
            )
        )
        return {"held_out": found}

    def save(self) -> None:
        """Write all that the run needs to go on."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "trained_seconds": self.trained_seconds,
            "rates": asdict(self.plan.rates),
        }
        partial = self._state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._state)

    def _resume(self) -> None:
        state = torch.load(self._state, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.trained_seconds = state["trained_seconds"]
        self.note(f"goes on from step {self.step} of {self._state}")

    def _request(self, feed: Feed, index: int, lengths: dict[int, int]) -> None:
        lengths[index] = schedule.length(self.plan.seed, index, self.progress(), self.plan.longest)
        feed.request(index, lengths[index])

    def _compile(self, batch: Batch) -> None:
        """Compile, unless that fails or is not faster; says how fast a step is either way."""

        def seconds() -> float:
            for _ in range(2):
                self._pass(batch)
            self._wait()
            start = time.monotonic()
            for _ in range(4):
                self._pass(batch)
            self._wait()
            return (time.monotonic() - start) / 4

        plain, compiled = seconds(), float("inf")
        start = time.monotonic()
        undo = self.network.compile_parts()
        try:
            with _time_limit(_COMPILE_SECONDS):
                compiled = seconds()
        except Exception as error:  # whatever the compiler raises, plain code computes the same
            self.note(f"does not compile, runs plainly: {type(error).__name__}: {str(error)[:500]}")
        if compiled >= plain:
            undo()
        took = time.monotonic() - start
        self._write(
            plain_pass_ms=round(plain * 1e3, 1),
            compiled_pass_ms=round(min(compiled, 1e6) * 1e3, 1),
            took_s=took,
        )
        self.note(
            f"forward and backward pass: {plain * 1e3:.0f} ms plain, {compiled * 1e3:.0f} ms compiled "
            f"({took:.0f} s to compile)"
        )

    def _pass(self, batch: Batch) -> None:
        ids, targets, _ = measure.to_device(batch, self.device)
        measure.losses(self.network, ids, targets).mean().backward()
        self.network.zero_grad(set_to_none=True)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _draw_held_out(self) -> dict[int, list[Batch]]:
        encoder = documents.Encoder(K3Tokenizer.from_json(self.tokenizer_json))
        tokens = self.plan.tokens
        lengths = [length for length in _HELD_OUT_LENGTHS if length <= min(self.plan.longest, tokens)]
        return {
            length: [Batch(*documents.batch(self.plan.seed, 0, length, tokens, encoder, Split.HELD_OUT))]
            for length in lengths or [self.plan.longest]
        }

    def _write(self, **values: Any) -> None:
        self._log.write(json.dumps(values) + "\n")
        self._log.flush()


@contextmanager
def _time_limit(seconds: int) -> Generator[None]:
    """Raise TimeoutError inside once the time is over. For the main thread alone."""

    def end(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
