"""How fast the engine reads a prompt and writes an answer, and how fast the operators alone could read it.

Prompts are random and all different, so that no cache helps. Prefill is timed from request to answer of one
token; decode over the time in which all requests of a batch are writing. The limit is the same prompt through
the model's operators in a process of their own, without an engine around them, while the engine is idle.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from bench.engines import note, running_engine
from model import tiny
from model.profile import load_profile

DECODE_BATCHES = (1, 4)
_DECODE_PROMPT_TOKENS = 64
_REQUEST_TIMEOUT_S = 600.0


def random_prompts(vocabulary: int, tokens: int, seed: int) -> Generator[list[int]]:
    """Prompts of `tokens` ids below `vocabulary`; no two share a beginning of note."""
    source = random.Random(seed)
    while True:
        yield [source.randrange(vocabulary) for _ in range(tokens)]


def prefill_seconds(client: httpx.Client, ids: Sequence[int]) -> float:
    """Seconds from sending a prompt to having one token of its answer."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    start = time.perf_counter()
    response = client.post("/generate", json={"input_ids": ids, "sampling_params": sampling})
    seconds = time.perf_counter() - start
    response.raise_for_status()
    cached = response.json()["meta_info"]["cached_tokens"]
    assert cached == 0, f"{cached} tokens of a new prompt came from a cache"
    return seconds


def decode_rate(client: httpx.Client, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens a second that a batch of requests writes while all of them are writing."""
    arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
    failures: list[Exception] = []

    def follow(row: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompts[row], "sampling_params": sampling, "stream": True}
        try:
            with client.stream("POST", "/generate", json=body) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        done = json.loads(line[6:])["meta_info"]["completion_tokens"]
                        arrivals[row].append((time.perf_counter(), int(done)))
        except (httpx.HTTPError, ValueError, KeyError) as error:
            failures.append(error)

    threads = [threading.Thread(target=follow, args=(row,)) for row in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    begin = max(row[0][0] for row in arrivals)
    end = min(row[-1][0] for row in arrivals)
    written = sum(_count_at(row, end) - _count_at(row, begin) for row in arrivals)
    return written / (end - begin)


def _count_at(row: Sequence[tuple[float, int]], moment: float) -> int:
    return max((count for at, count in row if at <= moment), default=0)


def operator_seconds(model: Path, ids: Sequence[int], repeats: int, threads: int) -> list[float]:
    """Seconds that the bare operators take for a prompt, after one run to warm up."""
    import torch

    from bench.bare_model import BareModel

    torch.set_num_threads(threads)
    bare, prompt = BareModel.load(model), torch.tensor(ids)
    seconds: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        bare.prefill(prompt)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _in_engine_environment(
    profile: str, model: Path, ids: Sequence[int], repeats: int, threads: int
) -> list[float]:
    """`operator_seconds` in a process that starts with the profile's environment, as the engine does."""
    with patch.dict(os.environ, load_profile(profile).command(model, 0).env):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(operator_seconds, model, ids, repeats, threads).result()


def measure(client: httpx.Client, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Ask a running engine, then the operators; seconds of every repeat are in the report."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))["text_config"]
    tokens, repeats = int(args.tokens), int(args.repeats)
    prompts = random_prompts(config["vocab_size"], tokens, args.seed)
    note(f"prefill of {tokens} tokens, {repeats} times")
    prefill_seconds(client, next(prompts))
    prefill = [prefill_seconds(client, next(prompts)) for _ in range(repeats)]
    short = random_prompts(config["vocab_size"], _DECODE_PROMPT_TOKENS, args.seed + 1)
    decode: dict[str, float] = {}
    for batch in DECODE_BATCHES:
        note(f"decode at batch {batch}")
        rows = [next(short) for _ in range(batch)]
        decode[str(batch)] = round(decode_rate(client, rows, args.decode_tokens), 1)
    note("the operators alone")
    operators = _in_engine_environment(args.profile, model, next(prompts), repeats, args.threads)
    return {
        "prompt_tokens": tokens,
        "prefill_tok_s": round(tokens / statistics.median(prefill), 1),
        "prefill_s": [round(s, 4) for s in prefill],
        "operators_tok_s": round(tokens / statistics.median(operators), 1),
        "operators_s": [round(s, 4) for s in operators],
        "decode_tok_s": decode,
        "threads": args.threads,
    }


@contextmanager
def _engine(args: argparse.Namespace, model: Path) -> Generator[httpx.Client]:
    if args.url is not None:
        with httpx.Client(base_url=args.url, timeout=_REQUEST_TIMEOUT_S) as client:
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="longhaul-prefill-") as folder:
        note("booting an engine")
        with running_engine(model, Path(folder) / "engine.log", profile=args.profile) as engine:
            yield engine.client


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefill", description=__doc__)
    parser.add_argument("--url", help="a running engine (default: boot one with the profile, and end it)")
    parser.add_argument(
        "--profile", default="cpu-tiny", help="launch profile of the engine (default: cpu-tiny)"
    )
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument("--tokens", type=int, default=4096, help="prompt tokens (default: 4096)")
    parser.add_argument("--repeats", type=int, default=5, help="prompts timed (default: 5)")
    parser.add_argument(
        "--decode-tokens", type=int, default=128, help="tokens written a request (default: 128)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of the operators alone (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    for name in ("tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.decode_tokens < 2:
        parser.error("--decode-tokens must be at least 2: the first token ends prefill")
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    with _engine(args, model) as client:
        report = measure(client, model, args)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "tokens a second", title=f"prompts of {report['prompt_tokens']} tokens")
    table.add_row("prefill through the engine", f"{report['prefill_tok_s']:,.0f}")
    table.add_row(f"operators alone, {report['threads']} threads", f"{report['operators_tok_s']:,.0f}")
    for batch, rate in report["decode_tok_s"].items():
        table.add_row(f"decode at batch {batch}", f"{rate:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
