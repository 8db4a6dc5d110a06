"""How fast the small K3 decodes with its draft and without, in this project's own torch code.

No engine: both ways are one loop around the same networks, as one CUDA graph a step where there is a GPU, so
that what differs is the draft alone. Messages of held-out agent sessions are written greedily, the prompt
already computed, and timed from its last token to the end of the message. `bench.decode` measures engines.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from model import small
from model.tasks.lexicon import Split
from model.training.command import note
from model.training.documents import Encoder
from speculative.decoding import Decoder, graphed
from speculative.draft import SHIPPED
from speculative.pair import Pair
from speculative.players import Player, Request
from speculative.speculation import Speculator

_MOST_TOKENS: Final = 256


def _synchronise(pair: Pair) -> None:
    if pair.target.lm_head.weight.is_cuda:
        torch.cuda.synchronize()


class Plain:
    """Decoding token by token."""

    def __init__(self, pair: Pair, batch: int, length: int) -> None:
        self._pair = pair
        self._decoder = Decoder(pair.target, batch, length, 0.0, pair.tokenizer.eos_ids)
        self._step: Callable[[], None] | None = None

    def write(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], int, float]:
        """The messages behind the prompts, the rounds that they took together, and the seconds."""
        decoder = self._decoder
        self._begin(prompts)
        if self._step is None:
            on_gpu = self._pair.target.lm_head.weight.is_cuda
            self._step = graphed(decoder.step, note) if on_gpu else decoder.step
            self._begin(prompts)
        _synchronise(self._pair)
        began = time.perf_counter()
        for _ in range(_MOST_TOKENS):
            self._step()
            if decoder.is_waiting.all():
                break
        seconds = time.perf_counter() - began
        known: list[int] = decoder.known.tolist()
        texts = decoder.text.tolist()
        found = [text[len(prompt) : end] for text, prompt, end in zip(texts, prompts, known, strict=True)]
        return found, sum(map(len, found)), seconds

    def _begin(self, prompts: Sequence[Sequence[int]]) -> None:
        decoder = self._decoder
        decoder.known.zero_()
        decoder.begin(prompts, (min(map(len, prompts)) - 1) // 64 * 64)
        while True:  # all but the last token of each
            decoder.is_waiting.copy_(decoder.at >= decoder.known - 1)
            if decoder.is_waiting.all():
                break
            decoder.step()
        decoder.is_waiting.zero_()


class Drafted:
    """Decoding block by block."""

    def __init__(self, pair: Pair, batch: int, length: int) -> None:
        self._pair = pair
        self._speculator = Speculator(pair.target, pair.draft, batch, length)
        self._step: Callable[[], None] | None = None
        self._ends = torch.tensor(sorted(pair.tokenizer.eos_ids), device=pair.target.lm_head.weight.device)
        self._back = torch.arange(pair.draft.config.block_size + 1, device=self._ends.device)

    def write(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], int, float]:
        """As `Plain.write`."""
        speculator = self._speculator
        decoder = speculator.decoder
        speculator.begin(prompts)
        if self._step is None:
            on_gpu = self._pair.target.lm_head.weight.is_cuda
            self._step = graphed(speculator.round, note) if on_gpu else speculator.round
            speculator.begin(prompts)
        has_ended = torch.zeros_like(decoder.is_waiting)
        rounds = torch.zeros_like(decoder.at)
        _synchronise(self._pair)
        began = time.perf_counter()
        for _ in range(_MOST_TOKENS):
            self._step()
            rounds += ~has_ended
            latest = decoder.text.gather(1, decoder.at.unsqueeze(1) - self._back)
            is_new = self._back <= speculator.accepted.unsqueeze(1)
            has_ended |= (torch.isin(latest, self._ends) & is_new).any(1)
            if has_ended.all() or int(decoder.at.max()) + 2 * len(self._back) >= decoder.text.shape[1]:
                break
        seconds = time.perf_counter() - began
        ends = self._pair.tokenizer.eos_ids
        found: list[list[int]] = []
        for text, prompt, at in zip(decoder.text.tolist(), prompts, decoder.at.tolist(), strict=True):
            message = text[len(prompt) : at + 1]
            stop = next((n for n, token in enumerate(message, 1) if token in ends), len(message))
            found.append(message[:stop])
        return found, int(rounds.sum()), seconds


def compare(pair: Pair, context: int, batch: int, groups: int, seed: int) -> dict[str, Any]:
    """Write the same messages both ways; tokens a second are those of all sequences together."""
    encoder = Encoder(pair.tokenizer)
    prompts = [
        Player(Request(f"bare/{seed}/{n}", Split.HELD_OUT, context), pair.tokenizer, encoder).prompt
        for n in range(batch * groups)
    ]
    length = -(-(max(map(len, prompts)) + _MOST_TOKENS + 64) // 64) * 64
    written: dict[str, list[list[int]]] = {}
    result: dict[str, Any] = {"context": context, "sequences": batch}
    for name, way in (("plain", Plain(pair, batch, length)), ("draft", Drafted(pair, batch, length))):
        rounds, seconds = 0, 0.0
        written[name] = []
        for group in range(groups):
            found, taken, spent = way.write(prompts[group * batch : (group + 1) * batch])
            written[name] += found
            rounds += taken
            seconds += spent
        tokens = sum(map(len, written[name]))
        result[f"{name}_tokens_per_second"] = round(tokens / seconds, 1)
        if name == "draft":
            result["accept_length"] = round(tokens / rounds, 3)
    plain, drafted = written.values()
    result["equal_messages"] = sum(one == other for one, other in zip(plain, drafted, strict=True))
    result["messages"] = len(plain)
    result["speedup"] = round(result["draft_tokens_per_second"] / result["plain_tokens_per_second"], 2)
    note(json.dumps(result))
    return result


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m bench.bare_decode", description=__doc__)
    parser.add_argument("--model", type=Path, default=small.SHIPPED, help="default: the small K3")
    parser.add_argument("--draft", type=Path, default=SHIPPED, help="default: its draft")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192], metavar="TOKENS")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8], help="at once (default: 1 8)")
    parser.add_argument("--groups", type=int, default=8, help="of sequences (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sessions (default: %(default)s)")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pair = Pair.load(args.model, args.draft, device, dtype)
    cases = [
        compare(pair, context, batch, args.groups, args.seed)
        for context in args.contexts
        for batch in args.sequences
    ]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    result = {"device": name, "dtype": str(dtype).removeprefix("torch."), "cases": cases}
    if args.json:
        print(json.dumps(result))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(*(column.replace("_", " ") for column in cases[0]), title=f"{name}, {result['dtype']}")
    for case in cases:
        table.add_row(*(str(value) for value in case.values()))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
