"""What the gateway costs: time to the first byte, and how much it carries, against other things in its place.

Behind everything stands the same stub engine, a process of its own that answers at once. Measured are

- the time to the first byte that the gateway adds to the engine's own, for the next turn of a recorded
  session of 2 thousand and of 142 thousand tokens;
- how long SGLang's chat path takes to render and tokenize those 142 thousand, with the checkpoint's tokenizer
  (`apply_chat_template` of transformers, as SGLang 0.5.23 calls it);
- requests and streams a second, from the same number of connections, through the gateway (with its ledger),
  the LiteLLM proxy, a plain reverse proxy, and none.

LiteLLM is installed into an environment of its own in the state directory unless `--no-litellm` is given.
"""

import argparse
import asyncio
import itertools
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import orjson

from bench.engines import note
from bench.local_servers import local_gateway, python_server, running
from bench.programs import installed
from bench.raw_client import RawClient
from bench.stub_engine import MODEL
from cache_store.servers import RedisServer, Role
from model.encoding import conversation_segments
from model.tokenizer import K3Tokenizer

CHAT: Final = "/v1/chat/completions"
LITELLM: Final = "litellm[proxy]==1.108.7"
SMALL_TOKENS: Final = 2_000
LARGE_TOKENS: Final = 142_000
SMALL_TURNS: Final = 4
TURNS: Final = 65
REPEATS: Final = 15
CONNECTIONS: Final = 16
ROUNDS: Final = 3
SECONDS: Final = 5.0
_STUB_TOKENS: Final = 64
_LITELLM_KEY: Final = f"sk-{secrets.token_hex(32)}"
_LITELLM_ENV: Final = {"LITELLM_LOG": "ERROR", "NO_DOCS": "True", "LITELLM_MASTER_KEY": _LITELLM_KEY}
_WORDS: Final = (
    "def",
    "return",
    "the",
    "module",
    "cache",
    "state",
    "token",
    "value",
    "import",
    "class",
    "0x1f",
)
_RENDER: Final = """
import json, statistics, sys, time
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
messages = json.load(open(sys.argv[2]))
times = []
for _ in range(int(sys.argv[3])):
    started_at = time.perf_counter()
    ids = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    times.append(time.perf_counter() - started_at)
print(json.dumps({"tokens": len(ids), "ms": statistics.median(times) * 1000}))
"""

Message = dict[str, Any]


def conversation(tokenizer: K3Tokenizer, tokens: int, turns: int) -> list[Message]:
    """A session of about so many tokens in so many turns, each a message and an answer but for the last."""
    chance = random.Random(tokens)
    share = tokens // turns
    messages: list[Message] = []
    for turn in range(turns):
        words = [chance.choice(_WORDS) for _ in range(share)]
        text = " ".join(words)
        while (excess := len(tokenizer.encode_text(text)) - share) > 0:
            del words[: excess // 2 + 1]
            text = " ".join(words)
        messages.append({"role": "user", "content": f"Result {turn}: {text}"})
        messages.append({"role": "assistant", "content": ""})  # what the gateway answers goes here
    return messages[:-1]


class Bench:
    """Everything under measurement, by name, in front of one stub engine."""

    def __init__(self, model: Path, scratch: Path, litellm: Path | None) -> None:
        self.model = model
        self.tokenizer = K3Tokenizer.load(model)
        self.urls: dict[str, str] = {}
        self._scratch = scratch
        self._litellm = litellm

    @contextmanager
    def servers(self) -> Generator[None]:
        """Start all of them."""
        with ExitStack() as held:
            argv = ["-m", "bench.stub_engine", "--model", str(self.model), "--tokens", str(_STUB_TOKENS)]
            engine, self.urls["direct"] = python_server("engine", argv, self._scratch)
            held.enter_context(running(engine))
            ledger = held.enter_context(RedisServer(Role.LEDGER, self._scratch / "ledger"))
            self._ledger_url = ledger.url
            gateway, self.urls["longhaul"] = local_gateway(
                self.urls["direct"], ledger.url, self.model, self._scratch
            )
            held.enter_context(running(gateway))
            argv = ["-m", "bench.proxy", "--upstream", self.urls["direct"]]
            proxy, self.urls["proxy"] = python_server("proxy", argv, self._scratch)
            held.enter_context(running(proxy))
            if self._litellm is not None:
                config = self._scratch / "litellm.yaml"
                config.write_text(
                    json.dumps(_litellm_config(self.urls["direct"])), encoding="utf-8"
                )  # JSON is YAML
                argv = [str(self._litellm), "--config", str(config), "--num_workers", "1"]
                litellm, self.urls["litellm"] = python_server(
                    "litellm", argv, self._scratch, health="/health/liveliness", env=_LITELLM_ENV
                )
                held.enter_context(running(litellm))
            yield

    async def first_byte(self, tokens: int, turns: int) -> dict[str, float]:
        """The time to the first byte for a session's next turn, in ms: the engine's own, and ours."""
        # An answer of the stub and the marks around it take some tokens, too.
        messages = conversation(self.tokenizer, tokens - turns * (_STUB_TOKENS + 40), turns)
        gateway = await RawClient.connect(self.urls["longhaul"])
        engine = await RawClient.connect(self.urls["direct"])
        for place in range(1, len(messages), 2):
            answer = await gateway.post(CHAT, {"model": MODEL, "messages": messages[:place]})
            messages[place] = orjson.loads(answer.body)["choices"][0]["message"]
        body = orjson.dumps({"model": MODEL, "messages": messages, "stream": True})
        ids = self.tokenizer.encode_segments(conversation_segments(messages))
        plain = orjson.dumps({"rid": "x", "input_ids": ids, "sampling_params": {}, "stream": True})
        times: dict[str, list[float]] = {"engine": [], "gateway": []}
        continued = 0
        for _ in range(REPEATS):
            times["engine"].append((await engine.post_bytes("/generate", plain)).first_s)
            answer = await gateway.post_bytes(CHAT, body)
            times["gateway"].append(answer.first_s)
            continued = int(answer.headers["x-longhaul-continued-tokens"])
        await gateway.close()
        await engine.close()
        medians = {name: statistics.median(values) * 1000 for name, values in times.items()}
        return {
            "prompt_tokens": len(ids),
            "continued_tokens": continued,
            "engine_ms": medians["engine"],
            "gateway_ms": medians["gateway"],
            "added_ms": medians["gateway"] - medians["engine"],
        }

    def engine_render_ms(self, tokens: int) -> float:
        """The time in which SGLang's chat path renders and tokenizes a session of so many tokens."""
        messages = conversation(self.tokenizer, tokens, TURNS)
        path = self._scratch / "messages.json"
        path.write_text(json.dumps(messages), encoding="utf-8")
        argv = [sys.executable, "-c", _RENDER, str(self.model), str(path), "5"]
        answer = subprocess.run(argv, capture_output=True, text=True, check=True)
        measured = json.loads(answer.stdout.splitlines()[-1])
        note(f"transformers: {measured}")
        return measured["ms"]

    def compared(self, *, stream: bool, seconds: float) -> dict[str, float]:
        """The medians of `rates` by name, in rounds: a machine that others use is fast and slow by turns."""
        rounds: dict[str, list[float]] = {name: [] for name in self.urls}
        for _ in range(ROUNDS):
            for name, rates in rounds.items():
                rates.append(asyncio.run(self.rates(name, stream=stream, seconds=seconds / ROUNDS)))
        kind = "streams" if stream else "requests"
        for name, rates in rounds.items():
            note(f"{name}: {', '.join(f'{rate:.0f}' for rate in rates)} {kind}/s")
        return {name: statistics.median(rates) for name, rates in rounds.items()}

    async def rates(self, name: str, *, stream: bool, seconds: float) -> float:
        """Whole answers a second, over `CONNECTIONS` connections."""
        numbers = itertools.count()
        ended = 0
        end = 0.0

        async def ask() -> None:
            nonlocal ended
            client = await RawClient.connect(self.urls[name], _LITELLM_KEY)
            while time.perf_counter() < end:
                text = f"Number {next(numbers)}: what does this do?"
                messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
                answer = await client.post(CHAT, {"model": MODEL, "messages": messages, "stream": stream})
                if answer.status != 200:
                    raise RuntimeError(f"{name}: {answer.status}: {answer.body[:300]!r}")
                ended += 1
            await client.close()

        end = time.perf_counter() + 1.0  # the first requests open connections and fill caches
        await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))
        ended = 0
        started_at = time.perf_counter()
        end = started_at + seconds
        await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))
        return ended / (time.perf_counter() - started_at)


def _litellm_config(engine_url: str) -> dict[str, Any]:
    parameters = {"model": f"openai/{MODEL}", "api_base": f"{engine_url}/v1", "api_key": "none"}
    return {"model_list": [{"model_name": MODEL, "litellm_params": parameters}]}


def measure(model: Path, scratch: Path, litellm: Path | None, seconds: float) -> dict[str, Any]:
    """Start everything, measure, and report."""
    bench = Bench(model, scratch, litellm)
    render_ms = bench.engine_render_ms(LARGE_TOKENS)
    with bench.servers():
        small = asyncio.run(bench.first_byte(SMALL_TOKENS, SMALL_TURNS))
        note(f"2k: {small}")
        large = asyncio.run(bench.first_byte(LARGE_TOKENS, TURNS))
        note(f"142k: {large}")
        requests, streams = (bench.compared(stream=stream, seconds=seconds) for stream in (False, True))
    return {
        "added_ms_2k": small["added_ms"],
        "added_ms_142k": large["added_ms"],
        "engine_render_ms_142k": render_ms,
        "of_engine_render": large["added_ms"] / render_ms,
        "first_byte_2k": small,
        "first_byte_142k": large,
        "requests_per_s": requests,
        "streams_per_s": streams,
        "vs_litellm": min(rates["longhaul"] / rates["litellm"] for rates in (requests, streams))
        if litellm is not None
        else None,
        "vs_proxy": min(rates["longhaul"] / rates["proxy"] for rates in (requests, streams)),
    }


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each load (%(default)s)")
    parser.add_argument("--no-litellm", action="store_true", help="leave LiteLLM out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    model: Path = (args.model or _tiny_checkpoint()).absolute()
    litellm = None if args.no_litellm else installed("litellm", LITELLM)
    with tempfile.TemporaryDirectory(prefix="longhaul-gateway-") as folder:
        report = measure(model, Path(folder), litellm, args.seconds)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0


def _tiny_checkpoint() -> Path:
    from model import tiny  # imports torch

    return tiny.build(tiny.default_path()).path


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "ms", title="time to the first byte, added to the engine's own")
    for name in ("added_ms_2k", "added_ms_142k", "engine_render_ms_142k"):
        table.add_row(name, f"{report[name]:.1f}")
    Console().print(table)
    table = Table("", "requests/s", "streams/s", title=f"{CONNECTIONS} connections")
    for name, rate in report["requests_per_s"].items():
        table.add_row(name, f"{rate:.0f}", f"{report['streams_per_s'][name]:.0f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
