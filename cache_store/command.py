"""Look at what the engines have stored, by tenant, pool and namespace, and remove it.

Every action walks all keys of the store's servers, in steps of about a millisecond, so that engines hardly
notice; 50,000 values take 1.4 s on two busy cores. A namespace is one kind of engine: weights, data types,
shapes, parallelism. Tenants are those that the gateway named; what came without one counts for "-".
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import redis
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from cache_store.inventory import Held, Inventory, ServerState
from cache_store.inventory import Progress as Report
from cache_store.options import URL_VARIABLE, StoreOptions
from cache_store.servers import socket_path

EXAMPLES = """\
  longhaul store stats
  longhaul store stats --url redis://blobs:6379/0 --json
  longhaul store list --tenant acme --pool mamba --limit 20
  longhaul store clear --tenant acme
  longhaul store clear --all --yes --url redis://a:6379,redis://b:6379
"""

_STATE_VARIABLE = "LONGHAUL_STATE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `longhaul store`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    stats = actions.add_parser("stats", help="values and bytes by namespace, pool and tenant")
    listing = actions.add_parser("list", help="single values, those that expire first at the top")
    listing.add_argument("--tenant", metavar="NAME", help="of this tenant alone")
    listing.add_argument("--pool", metavar="POOL", help="of this pool alone: kv, mamba (states), draft")
    listing.add_argument(
        "--limit", type=int, default=50, metavar="N", help="at most so many, 0 for all (default: %(default)s)"
    )
    clear = actions.add_parser("clear", help="remove what a tenant has stored, or everything")
    what = clear.add_mutually_exclusive_group(required=True)
    what.add_argument("--tenant", metavar="NAME", help='this tenant\'s values; "-" for those without one')
    what.add_argument("--all", action="store_true", help="all values of all tenants and namespaces")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    for action in (stats, listing, clear):
        action.add_argument(
            "--url",
            metavar="URL",
            help=f"of the blob server, several parted by commas (default: ${URL_VARIABLE}, else the server "
            f"of 'longhaul serve' in ${_STATE_VARIABLE} or ./.state)",
        )
        action.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Do as asked; 0 when it succeeded, 1 when the server failed or nobody agreed, 2 for a bad URL."""
    try:
        urls = StoreOptions.parse({"url": args.url or os.environ.get(URL_VARIABLE) or _own_url()}).urls
    except ValueError as error:
        print(f"longhaul store: --url: {error}", file=sys.stderr)
        return 2
    inventory = Inventory(urls)
    try:
        match args.action:
            case "stats":
                return _stats(inventory, as_json=args.json)
            case "list":
                return _list(inventory, args.tenant, args.pool, args.limit, as_json=args.json)
            case _:
                return _clear(
                    inventory, None if args.all else args.tenant, ask=not args.yes, as_json=args.json
                )
    except redis.RedisError as error:
        print(f"longhaul store: the server failed: {error}; is it running, and --url right?", file=sys.stderr)
        return 1
    finally:
        inventory.close()


@dataclass(slots=True)
class _Sum:
    """Of some records: values and, with their chunks, bytes."""

    values: int = 0
    bytes: int = 0

    def add(self, held: Held) -> None:
        self.values += not held.is_chunk
        self.bytes += held.nbytes


def _stats(inventory: Inventory, *, as_json: bool) -> int:
    servers = inventory.servers()
    pools: defaultdict[tuple[str, str, str], _Sum] = defaultdict(_Sum)
    tenants: defaultdict[str, _Sum] = defaultdict(_Sum)
    total = _Sum()
    with _progress("counting") as report:
        for held in inventory.records(report):
            pools[(held.namespace, held.pool, held.tenant)].add(held)
            tenants[held.tenant].add(held)
            total.add(held)
    if as_json:
        print(
            json.dumps(
                {
                    **asdict(total),
                    "servers": [asdict(server) for server in servers],
                    "tenants": {name: asdict(found) for name, found in sorted(tenants.items())},
                    "pools": [
                        {"namespace": space, "pool": pool, "tenant": tenant, **asdict(found)}
                        for (space, pool, tenant), found in sorted(pools.items())
                    ],
                }
            )
        )
        return 0
    console = Console()
    console.print(_server_table(servers))
    table = Table("namespace", "pool", "tenant", *_right("values", "bytes"))
    for (space, pool, tenant), found in sorted(pools.items()):
        table.add_row(space, pool, tenant, f"{found.values:,}", _size(found.bytes))
    table.add_section()
    table.add_row("all", "", "", f"{total.values:,}", _size(total.bytes))
    console.print(table)
    return 0


def _list(inventory: Inventory, tenant: str | None, pool: str | None, limit: int, *, as_json: bool) -> int:
    with _progress("listing") as report:
        found = [
            held
            for held in inventory.records(report)
            if not held.is_chunk and tenant in (None, held.tenant) and pool in (None, held.pool)
        ]
    found.sort(key=lambda held: (held.life_ms, held.key))
    shown = found[:limit] if limit > 0 else found
    if as_json:
        values = [
            {
                "key": held.key.decode(errors="replace"),
                "namespace": held.namespace,
                "pool": held.pool,
                "page": held.page,
                "tenant": held.tenant,
                "expires_s": held.life_ms / 1000,
            }
            for held in shown
        ]
        print(json.dumps({"values": values, "found": len(found)}))
        return 0
    table = Table("namespace", "pool", "page", "tenant", *_right("expires in"))
    for held in shown:
        page, _, shard = held.page.partition(":")
        table.add_row(
            held.namespace, held.pool, f"{page[:16]} {shard}".strip(), held.tenant, _time(held.life_ms)
        )
    Console().print(table)
    if len(shown) < len(found):
        print(f"{len(shown):,} of {len(found):,}: --limit 0 shows all", file=sys.stderr)
    return 0


def _clear(inventory: Inventory, tenant: str | None, *, ask: bool, as_json: bool) -> int:
    whose = "everything" if tenant is None else f"what tenant {tenant!r} has"
    if ask:
        names = ", ".join(server.name for server in inventory.servers())
        if not sys.stdin.isatty():
            print("longhaul store clear: give --yes where nobody can be asked", file=sys.stderr)
            return 1
        print(
            f"Remove {whose} in {names}? Engines compute it again. [y/N] ",
            end="",
            file=sys.stderr,
            flush=True,
        )
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    with _progress("removing") as report:
        values, nbytes = inventory.remove(tenant, report)
    if as_json:
        print(json.dumps({"tenant": tenant, "removed_values": values, "removed_bytes": nbytes}))
    else:
        Console().print(f"removed {values:,} values, {_size(nbytes)}")
    return 0


@contextmanager
def _progress(what: str) -> Generator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _own_url() -> str:
    state = Path(os.environ.get(_STATE_VARIABLE) or ".state").expanduser().absolute()
    return f"unix://{socket_path(state / 'redis' / 'blobs')}"


def _server_table(servers: Iterable[ServerState]) -> Table:
    table = Table("server", *_right("keys", "used", "of", "evicted", "expired"))
    for server in servers:
        limit = _size(server.max_bytes) if server.max_bytes else "no limit"
        table.add_row(
            server.name,
            f"{server.keys:,}",
            _size(server.used_bytes),
            limit,
            f"{server.evicted:,}",
            f"{server.expired:,}",
        )
    return table


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _size(nbytes: int) -> str:
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}" if units[0] != "B" else f"{nbytes} B"


def _time(life_ms: int) -> str:
    if life_ms < 0:
        return "never"
    seconds = life_ms // 1000
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
