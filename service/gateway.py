"""Serve agents over HTTP in front of running engines: OpenAI's APIs and Anthropic's, with exact turns.

On SIGTERM or Ctrl-C no new connections are taken, and requests get --drain-s seconds to end.
"""

import argparse
import gc
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, cast, get_args

import httpx
import uvicorn

from cache_store.decoded import DEFAULT_BUDGET_BYTES
from cache_store.ledger import DEFAULT_TTL_S, Ledger
from cache_store.retention import TtlClass
from cache_store.roots import RootRegistry
from model.state import state_directory
from model.tokenizer import K3Tokenizer, TokenizerError
from service.access import JsonFormatter
from service.admission import HOLD_S, HOLD_WITH_STORE_S, SHARE, WAIT_S, AdmissionSettings
from service.app import build_app
from service.engine import Engine
from service.engine_watch import EngineWatch
from service.engines import Engines
from service.metrics import Metrics
from service.quotas import Quotas
from service.responses_store import ResponseStore
from service.runner import TurnRunner
from service.sampling import checkpoint_defaults
from service.signature import Signatures
from service.tenants import Tenants, TenantsFileError
from service.turns import Turns
from service.web import Service

log = logging.getLogger(__name__)

_GC_THRESHOLDS = (20_000, 10, 20)
LOG_LEVELS = ("debug", "info", "warning", "error")
_ENGINE_URL: Final = "http://127.0.0.1:30000"
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
EXAMPLES = """\
  longhaul gateway
  longhaul gateway --engine http://engine:30000 --ledger redis://ledger:6379/0 --model /models/kimi-k3
  longhaul gateway --engine http://engine-1:30000 --engine http://engine-2:30000
  longhaul gateway --host 0.0.0.0 --tenants tenants.toml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longhaul gateway`."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    parser.add_argument(
        "--engine",
        action="append",
        metavar="URL",
        help=f"SGLang ({_ENGINE_URL}); more than once: replicas on one store, a session stays with one",
    )
    parser.add_argument(
        "--ledger",
        default="redis://127.0.0.1:6379/0",
        metavar="URL",
        help="Redis of the turn ledger: redis://, rediss:// or unix:// (%(default)s)",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="Redis of the engine's pages and states, to say there whose they are and how long to keep them",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint, for its tokenizer (<state>/models/k3-small)"
    )
    parser.add_argument(
        "--tenants", type=Path, metavar="FILE", help="API keys, TOML; without it no key is asked"
    )
    parser.add_argument(
        "--turn-ttl",
        type=turn_ttl,
        action="append",
        default=[],
        metavar="[CLASS=]TIME",
        help="how long a turn lives after its last use, such as 30d; with CLASS (5m, 1h, 24h) turns whose "
        "client asked for that (7d)",
    )
    parser.add_argument(
        "--drop-tails",
        action="store_true",
        help="leave tool_choice and response_format texts of earlier turns out of later prompts",
    )
    parser.add_argument(
        "--replace-images",
        action="store_true",
        help="put a text where a conversation has images that no engine sees, instead of refusing it",
    )
    parser.add_argument(
        "--ping-s", type=float, default=10.0, metavar="S", help="ping a silent stream so often (%(default)s)"
    )
    parser.add_argument(
        "--drain-s",
        type=int,
        default=60,
        metavar="S",
        help="time to end requests when stopping (%(default)s)",
    )
    parser.add_argument(
        "--max-body-mib", type=int, default=64, metavar="MIB", help="longest request body (%(default)s)"
    )
    parser.add_argument(
        "--turn-cache-mib",
        type=int,
        default=DEFAULT_BUDGET_BYTES >> 20,
        metavar="MIB",
        help="memory for turns that were read before (%(default)s)",
    )
    parser.add_argument(
        "--admission",
        choices=("off", "on"),
        default="off",
        help="on: let sessions wait for a place on the engine's device when more are live than it holds "
        "(%(default)s)",
    )
    parser.add_argument(
        "--admission-wait-s",
        type=float,
        default=WAIT_S,
        metavar="S",
        help="longest wait for a place (%(default)s)",
    )
    parser.add_argument(
        "--admission-hold-s",
        type=float,
        metavar="S",
        help="how long an idle session keeps its place when others wait "
        f"({HOLD_S:g}, with --store {HOLD_WITH_STORE_S:g})",
    )
    parser.add_argument(
        "--admission-share",
        type=float,
        default=SHARE,
        metavar="SHARE",
        help="of an engine's KV that this gateway's sessions may fill; with several gateways a part for each "
        "(%(default)s)",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="(%(default)s)")


def turn_ttl(text: str) -> tuple[TtlClass | None, int]:
    """A class, or None for all, and its time to live in seconds, from `[CLASS=]TIME`."""
    before, equals, after = text.partition("=")
    name, time = (before, after) if equals else (None, before)
    unit = _UNITS_S.get(time[-1:])
    number = time[:-1]
    if unit is None or not (number.isascii() and number.isdecimal()) or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a time is a whole number and s, m, h or d, such as 7d")
    if name is not None and name not in get_args(TtlClass):
        raise argparse.ArgumentTypeError(f"{text!r}: a class is one of {', '.join(get_args(TtlClass))}")
    return cast("TtlClass | None", name), int(number) * unit


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; exit status 2 when the gateway can't be set up."""
    _set_up_logging(args.log_level)
    model = args.model or state_directory() / "models" / "k3-small"
    try:
        service = build_service(
            engine_urls=args.engine or [_ENGINE_URL],
            ledger_url=args.ledger,
            store_url=args.store,
            turn_ttl_s=dict(args.turn_ttl),
            turn_cache_bytes=args.turn_cache_mib << 20,
            model=model,
            tenants=Tenants.load(args.tenants),
            keep_tails=not args.drop_tails,
            replace_images=args.replace_images,
            max_body_bytes=args.max_body_mib << 20,
            ping_interval_s=args.ping_s,
            admission=_admission(args),
        )
    except (TenantsFileError, TokenizerError, ValueError, httpx.InvalidURL) as error:
        print(f"longhaul gateway: {error}", file=sys.stderr)
        return 2
    if service.tenants.open and not _is_loopback(args.host):
        log.warning("%s is open to the network and nobody needs a key: give --tenants", args.host)
    return serve(service, host=args.host, port=args.port, drain_s=args.drain_s)


def _admission(args: argparse.Namespace) -> AdmissionSettings | None:
    """Raises ValueError for a setting out of range."""
    if args.admission == "off":
        return None
    default_hold_s = HOLD_S if args.store is None else HOLD_WITH_STORE_S
    return AdmissionSettings(
        wait_s=args.admission_wait_s,
        hold_s=default_hold_s if args.admission_hold_s is None else args.admission_hold_s,
        share=args.admission_share,
        store=args.store is not None,
    )


def build_service(
    *,
    engine_urls: Sequence[str],
    ledger_url: str,
    store_url: str | None = None,
    turn_ttl_s: Mapping[TtlClass | None, int] | None = None,
    turn_cache_bytes: int = DEFAULT_BUDGET_BYTES,
    model: Path,
    tenants: Tenants,
    keep_tails: bool = True,
    replace_images: bool = False,
    max_body_bytes: int = 64 << 20,
    ping_interval_s: float = 10.0,
    stall_s: float = 300.0,
    grace_s: float = 5.0,
    admission: AdmissionSettings | None = None,
) -> Service:
    """Put a gateway together; nothing is connected yet.

    Raises TokenizerError, or ValueError for an address that is none. `LONGHAUL_ENGINE_API_KEY` in the
    environment is SGLang's `--api-key`. `turn_ttl_s`: how long turns of a class live, None for those of no
    class and of every other. `admission` None: every turn is let in at once.
    """
    for url in engine_urls:
        if httpx.URL(url).scheme not in ("http", "https"):
            raise ValueError(f"--engine {url}: must be an http:// or https:// URL")
    tokenizer = K3Tokenizer.load(model)
    metrics = Metrics()
    api_key = os.environ.get("LONGHAUL_ENGINE_API_KEY")
    engines = Engines(
        [Engine(url, vocabulary=tokenizer.vocab_size, api_key=api_key) for url in engine_urls],
        metrics,
        admission,
    )
    ttl_s = dict(turn_ttl_s or {})
    class_ttl_s: dict[TtlClass, int] = {name: ttl for name, ttl in ttl_s.items() if name is not None}
    ledger = Ledger(
        ledger_url,
        ttl_s=ttl_s.get(None, DEFAULT_TTL_S),
        class_ttl_s=class_ttl_s,
        decoded_bytes=turn_cache_bytes,
    )
    turns = Turns(ledger, tokenizer, keep_tails=keep_tails)
    return Service(
        engines=engines,
        watch=EngineWatch(engines, tokenizer, metrics),
        ledger=ledger,
        runner=TurnRunner(
            engines,
            turns,
            tokenizer,
            Quotas(ledger, metrics),
            metrics,
            roots=None if store_url is None else RootRegistry(store_url),
            grace_s=grace_s,
        ),
        tenants=tenants,
        tokenizer=tokenizer,
        metrics=metrics,
        signatures=Signatures(ledger),
        responses=ResponseStore(ledger),
        sampling_defaults=checkpoint_defaults(model),
        max_body_bytes=max_body_bytes,
        ping_interval_s=ping_interval_s,
        stall_s=stall_s,
        replace_images=replace_images,
    )


def serve(service: Service, *, host: str, port: int, drain_s: int) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    config = uvicorn.Config(
        build_app(service),
        host=host,
        port=port,
        loop="uvloop",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_s,
    )
    server = uvicorn.Server(config)
    # What is there now stays: a collection need not look at it. A prompt is a list of 100,000 ids, and
    # a full collection looks at every one that is under way, so it had better be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    # uvicorn raises the signal that stopped it once more when it is done: a clean stop is no failure.
    for stopping in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stopping, _ignore)
    try:
        server.run()
    except SystemExit:  # the port is taken; uvicorn has said so
        return 1
    return 0 if server.started else 1


def _ignore(_signal: int, _frame: FrameType | None) -> None:
    pass


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
