"""Serve everything on this machine: Redis for blobs and for the ledger, the engine, the gateway.

Without a GPU, a small K3 that calls tools answers on the CPU (`model/k3_small`). Redis servers of its own are
started unless URLs are given. Data and logs live in the state directory and survive a restart. Ctrl-C stops
everything.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cache_store.lock import DirectoryInUse, DirectoryLock
from cache_store.servers import STOP_TIMEOUT_S, ServerError, own_servers
from model import small
from model.arguments import is_sglang_installed, verify
from model.engine import checkpoint, select_profile
from model.profile import DEFAULT_PORT, SERVED_MODEL_NAME, Profile, ProfileError, profile_names
from model.state import state_directory
from service.display import Display
from service.logs import Follower, rotate
from service.ports import PortError, check_port
from service.processes import Service
from service.stack import (
    CPU_START_TIMEOUT_S,
    CUDA_START_TIMEOUT_S,
    ENGINE_HOST,
    GATEWAY_START_TIMEOUT_S,
    default_blob_bytes,
    engine_service,
    gateway_service,
    reachable,
)
from service.supervisor import Supervised, SupervisionError, Supervisor

EXAMPLES = """\
  longhaul serve
  longhaul serve --port 8080 --state-dir /var/lib/longhaul
  longhaul serve --replicas 2
  longhaul serve --profile b300-8 --model /models/Kimi-K3 --host 0.0.0.0 --tenants tenants.toml
"""

GATEWAY_PORT = 8000
_REDIS_START_TIMEOUT_S = 300.0  # a large ledger is read at start


@dataclass(frozen=True, slots=True)
class Layout:
    """What `serve` was asked for, checked."""

    profile: Profile
    host: str
    port: int
    engine_ports: tuple[int, ...]
    state: Path
    model: Path

    @property
    def logs(self) -> Path:
        """Where the logs go."""
        return self.state / "logs"

    @property
    def engine_urls(self) -> list[str]:
        """Where the gateway finds the engines."""
        return [f"http://{ENGINE_HOST}:{port}" for port in self.engine_ports]

    @property
    def url(self) -> str:
        """Where clients find the gateway."""
        return f"http://{reachable(self.host)}:{self.port}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longhaul serve`."""
    parser.add_argument("--host", default="127.0.0.1", help="address of the gateway (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=GATEWAY_PORT, help="port of the gateway (default: %(default)s)"
    )
    parser.add_argument(
        "--engine-port", type=int, default=DEFAULT_PORT, help="port of the engine (default: %(default)s)"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="engines on the CPU, on ports from --engine-port on; a session stays with one while it lives",
    )
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="the checkpoint; default: the small K3, on the CPU"
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help=f"a launch profile ({', '.join(profile_names())}) or a .toml file; default: by the GPUs here",
    )
    parser.add_argument(
        "--draft",
        metavar="PATH",
        help="a DSpark checkpoint to speculate with, or `none`; default: the small K3 has one, others none",
    )
    parser.add_argument("--store-url", metavar="URL", help="Redis for blobs, instead of one's own")
    parser.add_argument("--ledger-url", metavar="URL", help="Redis for the ledger, instead of one's own")
    parser.add_argument(
        "--no-store", action="store_true", help="keep no blobs outside the engine: a restart starts cold"
    )
    parser.add_argument(
        "--store-memory",
        type=float,
        metavar="GIB",
        help="what one's own blob store may hold (default: an eighth of the memory)",
    )
    parser.add_argument(
        "--tenants", type=Path, metavar="FILE", help="API keys and tenants (TOML); default: open"
    )
    parser.add_argument(
        "--replace-images", action="store_true", help="let a text stand in for images, instead of refusing"
    )
    parser.add_argument(
        "--admission",
        choices=("off", "on"),
        default="off",
        help="on: let sessions wait for a place on the engine's device when more are live than it holds "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="data, logs, models (default: $LONGHAUL_STATE or ./.state)",
    )
    parser.add_argument("--verbose", action="store_true", help="show the logs on the terminal too")
    parser.add_argument("--json", action="store_true", help="when ready, print one JSON object")
    parser.add_argument("extra", nargs="*", metavar="-- ARGUMENT ...", help="further arguments for SGLang")


def lay_out(args: argparse.Namespace) -> Layout:
    """Check what can be checked before anything is started; raises `ProfileError` or `PortError`."""
    if not is_sglang_installed():
        raise ProfileError("SGLang is not installed here: run `make setup`")
    if args.no_store and args.store_url:
        raise ProfileError("--no-store and --store-url contradict each other: give one of them")
    if args.store_memory is not None and args.store_memory <= 0:
        raise ProfileError(f"--store-memory {args.store_memory}: give a positive number of GiB")
    for option, path in (("--tenants", args.tenants), ("--draft", draft_path(args))):
        if path is not None and not path.exists():
            raise ProfileError(f"{option} {path}: there is no such file")
    state = state_directory(args.state_dir)
    profile, _ = select_profile(args.profile)
    model = checkpoint(profile, args.model, state)
    profile.check(model, draft_path(args), args.extra)
    if args.replicas < 1:
        raise ProfileError(f"--replicas {args.replicas}: give a number from 1 on")
    if args.replicas > 1 and profile.device != "cpu":
        raise ProfileError(
            f"--replicas {args.replicas}: profile {profile.name} takes all GPUs of a machine; run "
            "`longhaul engine` on each machine, and `longhaul gateway` with --engine once for each"
        )
    engine_ports = tuple(range(args.engine_port, args.engine_port + args.replicas))
    if args.port == args.engine_port:
        raise PortError(f"--port and --engine-port are both {args.port}: give different ones")
    if args.port in engine_ports:
        raise PortError(
            f"--port {args.port} is one of the engines' ports ({engine_ports[0]} to {engine_ports[-1]}): "
            "give another"
        )
    check_port(args.host, args.port, "--port")
    for port in engine_ports:
        check_port(ENGINE_HOST, port, "--engine-port")
    return Layout(profile, args.host, args.port, engine_ports, state, model)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM (0); 1 when a service fails, 2 when it can't be started as asked."""
    display = Display()
    try:
        layout = lay_out(args)
    except (ProfileError, PortError) as error:
        print(f"longhaul serve: {error}", file=sys.stderr)
        return 2
    lock = DirectoryLock(layout.state)
    try:
        layout.state.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, DirectoryInUse) as error:
        print(f"longhaul serve: {error}", file=sys.stderr)
        return 2
    display.console.print(f"profile {layout.profile.name}: {layout.profile.summary}", soft_wrap=True)
    supervisor = Supervisor(display)
    status = 0
    with supervisor.signals():
        try:
            _serve(args, layout, supervisor, display)
        except KeyboardInterrupt:
            display.note("stopping")
        except (SupervisionError, ProfileError, ServerError, OSError) as error:
            display.close()
            print(f"longhaul serve: {error}", file=sys.stderr)
            status = 1
        finally:
            supervisor.stop()
            display.close()
            lock.release()
    if status == 0:
        display.note("stopped")
    return status


def draft_path(args: argparse.Namespace) -> Path | None:
    """The draft to speculate with: the small K3's own unless told otherwise."""
    if args.draft is None:
        return small.DRAFT if args.model is None else None
    return None if args.draft == "none" else Path(args.draft).absolute()


def _serve(args: argparse.Namespace, layout: Layout, supervisor: Supervisor, display: Display) -> None:
    """Start everything, say so, and watch."""
    started: list[Service] = []

    def start(service: Service, timeout_s: float, orphan_grace_s: float = 0.0) -> None:
        rotate(service.log)
        started.append(service)
        supervisor.start(Supervised(service, timeout_s, orphan_grace_s))

    if args.model is None:
        small.build(layout.model)
    store_url, ledger_url = _start_redis(args, layout, start)
    draft = draft_path(args)
    commands = [
        layout.profile.command(layout.model, port, store_url=store_url, draft=draft, extra=args.extra)
        for port in layout.engine_ports
    ]
    display.busy("checking the engine's arguments", 0.0)
    verify(layout.profile.name, commands[0], memory=layout.state / "checked")
    for number, (port, command) in enumerate(zip(layout.engine_ports, commands, strict=True), 1):
        name = "engine" if len(commands) == 1 else f"engine-{number}"
        engine = engine_service(command, port, layout.logs / f"{name}.log", name)
        start(engine, CPU_START_TIMEOUT_S if layout.profile.device == "cpu" else CUDA_START_TIMEOUT_S)
    gateway = gateway_service(
        host=layout.host,
        port=layout.port,
        engine_urls=layout.engine_urls,
        ledger_url=ledger_url,
        store_url=store_url,
        model=layout.model,
        tenants=args.tenants,
        log=layout.logs / "gateway.log",
        extra=[
            *(["--replace-images"] if args.replace_images else []),
            *("--admission", args.admission),
        ],
    )
    start(gateway, GATEWAY_START_TIMEOUT_S)
    _announce(args, layout, started, store_url, ledger_url, display)
    supervisor.watch(_follower(started, display) if args.verbose else lambda: None)


def _start_redis(
    args: argparse.Namespace, layout: Layout, start: Callable[..., None]
) -> tuple[str | None, str]:
    """Start the Redis servers that were not given; the URLs of the blob store (None: none) and the ledger."""
    memory = default_blob_bytes() if args.store_memory is None else int(args.store_memory * (1 << 30))
    blobs, ledger = own_servers(layout.state, blob_bytes=memory, log_directory=layout.logs)
    store_url: str | None = args.store_url
    ledger_url: str | None = args.ledger_url
    if store_url is None and not args.no_store:
        start(blobs, _REDIS_START_TIMEOUT_S, STOP_TIMEOUT_S)
        store_url = blobs.url
    if ledger_url is None:
        start(ledger, _REDIS_START_TIMEOUT_S, STOP_TIMEOUT_S)
        ledger_url = ledger.url
    return store_url, ledger_url


def _announce(
    args: argparse.Namespace,
    layout: Layout,
    started: list[Service],
    store_url: str | None,
    ledger_url: str,
    display: Display,
) -> None:
    """Say where it serves: for people on standard error, with --json for programs on standard output."""
    body = {"model": SERVED_MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    words = ["curl", f"{layout.url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if args.tenants is not None:
        words += ["-H", "Authorization: Bearer YOUR_KEY"]
    display.close()
    display.console.print(f"\n[bold green]Longhaul serves {layout.url}/v1[/]  (Ctrl-C stops it)\n")
    # Printed as it is, so that a terminal's width doesn't break what is to be pasted.
    display.console.out(f"  {shlex.join([*words, '-d', json.dumps(body)])}\n", highlight=False)
    display.console.print(f"  metrics {layout.url}/metrics   logs {layout.logs}/\n", soft_wrap=True)
    if args.json:
        answer = {
            "url": layout.url,
            "engine_url": layout.engine_urls[0],
            "engine_urls": layout.engine_urls,
            "profile": layout.profile.name,
            "model": str(layout.model),
            "state": str(layout.state),
            "store_url": store_url,
            "ledger_url": ledger_url,
            "pids": {service.name: service.pid for service in started},
        }
        print(json.dumps(answer), flush=True)


def _follower(services: list[Service], display: Display) -> Callable[[], None]:
    follower = Follower({service.name: service.log for service in services})

    def follow() -> None:
        follower.read(lambda name, line: display.console.out(f"{name:<12} {line}", highlight=False))

    return follow
