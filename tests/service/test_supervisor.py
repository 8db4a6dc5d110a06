"""Supervision with real processes: order, readiness, restarts, and that nothing is ever left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cache_store.process import ChildProcess
from service.logs import Follower, rotate
from service.ports import PortError, check_port
from service.processes import Guardian, HttpService, Service
from service.supervisor import RestartPolicy, Supervised, SupervisionError, Supervisor

# A server with a child of its own that no SIGTERM ends and that doesn't notice its parent's death: the worst
# that an engine can do. It notes both process ids.
SERVER = """
import http.server, os, subprocess, sys
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
with open(sys.argv[2], "a") as notes:
    notes.write(f"{os.getpid()} {child.pid}\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []

    def starting(self, service: Service) -> None:
        self.events.append(("starting", service.name))

    def waiting(self, service: Service, elapsed_s: float) -> None:
        pass

    def ready(self, service: Service, elapsed_s: float) -> None:
        self.events.append(("ready", service.name))

    def died(self, service: Service, status: int, delay_s: float, deaths: int, limit: int) -> None:
        self.events.append(("died", service.name, str(status), str(deaths)))

    def stopping(self, service: Service) -> None:
        self.events.append(("stopping", service.name))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server(folder: Path, name: str, *, program: str = SERVER) -> HttpService:
    port = free_port()
    return HttpService(
        name,
        [sys.executable, "-c", program, str(port), str(folder / f"{name}.pids")],
        env=dict(os.environ),
        health_url=f"http://127.0.0.1:{port}/health",
        log=folder / f"{name}.log",
        grace_s=5.0,
    )


def pids(folder: Path, name: str) -> list[int]:
    return [int(word) for word in (folder / f"{name}.pids").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_end(found: list[int], limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if not any(is_running(pid) for pid in found):
            return True
        time.sleep(0.05)
    return False


def until(condition: object, limit_s: float = 20.0) -> None:
    assert callable(condition)
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "did not come about"
        time.sleep(0.05)


class Enough(Exception):
    """Ends `watch` from within a test."""


def test_services_start_in_order_and_stop_in_reverse(tmp_path: Path) -> None:
    recorder = Recorder()
    supervisor = Supervisor(recorder)
    try:
        for name in ("first", "second"):
            supervisor.start(Supervised(server(tmp_path, name), 20))
        found = pids(tmp_path, "first") + pids(tmp_path, "second")
        assert len(found) == 4 and all(is_running(pid) for pid in found)
    finally:
        supervisor.stop()
    assert recorder.events == [
        *(("starting", "first"), ("ready", "first"), ("starting", "second"), ("ready", "second")),
        *(("stopping", "second"), ("stopping", "first")),
    ]
    assert not any(is_running(pid) for pid in found), "gone when stop returns, the stubborn children too"


def test_a_service_that_ends_while_starting_shows_its_log(tmp_path: Path) -> None:
    supervisor = Supervisor(Recorder())
    broken = server(tmp_path, "engine", program="print('no weights there', flush=True); raise SystemExit(7)")
    try:
        with pytest.raises(
            SupervisionError, match=r"(?s)engine ended with status 7.*engine\.log.*no weights"
        ):
            supervisor.start(Supervised(broken, 20))
    finally:
        supervisor.stop()


def test_a_service_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    supervisor = Supervisor(Recorder())
    silent = server(tmp_path, "engine", program="import time; time.sleep(60)")
    try:
        with pytest.raises(SupervisionError, match="engine is not ready after 1 s"):
            supervisor.start(Supervised(silent, 1))
        pid = silent.pid
        assert pid is not None and is_running(pid)
    finally:
        supervisor.stop()
    assert not is_running(pid)


def test_a_program_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    supervisor = Supervisor(Recorder())
    absent = HttpService(
        "engine", ["/no/such"], env={}, health_url="http://127.0.0.1:1/", log=tmp_path / "log", grace_s=1
    )
    try:
        with pytest.raises(SupervisionError, match="engine does not start: no program /no/such"):
            supervisor.start(Supervised(absent, 1))
    finally:
        supervisor.stop()


def test_what_dies_is_started_again_without_what_it_left(tmp_path: Path) -> None:
    recorder = Recorder()
    supervisor = Supervisor(recorder, RestartPolicy(first_delay_s=0.1, max_delay_s=0.1))
    engine = server(tmp_path, "engine")

    def each() -> None:
        if recorder.events[-1] == ("ready", "engine"):
            if len(pids(tmp_path, "engine")) == 4:
                raise Enough
            os.kill(pids(tmp_path, "engine")[0], signal.SIGKILL)

    try:
        supervisor.start(Supervised(engine, 20))
        with pytest.raises(Enough):
            supervisor.watch(each)
        first, orphan, second, _ = pids(tmp_path, "engine")
        assert not is_running(first) and not is_running(orphan) and is_running(second)
        assert recorder.events.count(("died", "engine", "-9", "1")) == 1
    finally:
        supervisor.stop()


def test_what_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    recorder = Recorder()
    supervisor = Supervisor(recorder, RestartPolicy(first_delay_s=0.05, max_delay_s=0.05, limit=2))
    engine = server(tmp_path, "engine")

    def each() -> None:
        if recorder.events[-1] == ("ready", "engine"):
            os.kill(pids(tmp_path, "engine")[-2], signal.SIGKILL)
            recorder.events.append(("killed",))

    try:
        supervisor.start(Supervised(engine, 20))
        with pytest.raises(
            SupervisionError, match=r"engine was ended by signal 9 \(Killed\), 3 times within"
        ):
            supervisor.watch(each)
    finally:
        supervisor.stop()
    assert not any(is_running(pid) for pid in pids(tmp_path, "engine"))


def test_the_pause_grows_to_its_bound() -> None:
    policy = RestartPolicy(first_delay_s=1, max_delay_s=10)
    assert [policy.delay_s(deaths) for deaths in (1, 2, 3, 4, 5, 60)] == [1, 2, 4, 8, 10, 10]


SUPERVISED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_supervisor import Recorder, server
from service.supervisor import Supervised, Supervisor
supervisor = Supervisor(Recorder())
with supervisor.signals():
    try:
        supervisor.start(Supervised(server(Path(sys.argv[2]), "engine"), 20))
        print("up", flush=True)
        supervisor.watch()
    except KeyboardInterrupt:
        pass
    finally:
        supervisor.stop()
print("stopped", flush=True)
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_the_supervisor(tmp_path: Path, ending: signal.Signals) -> None:
    command = [sys.executable, "-c", SUPERVISED, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "up\n"
        found = pids(tmp_path, "engine")
        helpers = [child.pid for child in psutil.Process(supervisor.pid).children(recursive=True)]
        assert set(found) <= set(helpers) and len(helpers) == 3, "the server, its child and the guardian"
        supervisor.send_signal(ending)
        said, _ = supervisor.communicate(timeout=20)
        assert said == ("" if ending == signal.SIGKILL else "stopped\n")
    assert all_end(helpers)


def test_a_second_signal_ends_what_does_not_want_to_stop(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER
    program = SUPERVISED.replace("Recorder, server", "Recorder, server, SERVER").replace(
        '"engine")', f'"engine", program={deaf!r})'
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "up\n"
        start = time.monotonic()
        supervisor.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert supervisor.poll() is None, "within the grace of 5 s"
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.communicate(timeout=20)[0] == "stopped\n"
        assert time.monotonic() - start < 4
    assert all_end(pids(tmp_path, "engine"))


def test_the_guardian_spares_what_was_released(tmp_path: Path) -> None:
    guardian = Guardian()
    kept = ChildProcess.start(["sleep", "60"])
    watched = ChildProcess.start(["sleep", "60"])
    guardian.watch(kept.pid, 0)
    guardian.watch(watched.pid, 0)
    guardian.release(kept.pid)
    guardian.fire()
    assert watched.kill() == -signal.SIGKILL and kept.poll() is None
    assert kept.kill() == -signal.SIGKILL
    guardian.fire()
    guardian.watch(kept.pid, 0)  # a guardian that is gone is no error


def test_a_port_in_use_names_the_port_and_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"port {port} on 127\.0\.0\.1 is in use.*--engine-port"):
            check_port("127.0.0.1", port, "--engine-port")
    check_port("127.0.0.1", port, "--engine-port")


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("127.0.0.1", 0, "--port 0 is not a port"),
        ("127.0.0.1", 70000, "--port 70000 is not a port"),
        ("no such host", 8000, "--host no such host"),
        ("192.0.2.1", 8000, r"port 8000 on 192\.0\.2\.1 can't be used \(Cannot assign requested address\)"),
    ],
)
def test_an_address_that_makes_no_sense_is_refused(host: str, port: int, said: str) -> None:
    with pytest.raises(PortError, match=said):
        check_port(host, port, "--port")


def test_a_log_is_followed_by_whole_lines_and_kept_from_the_run_before(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    rotate(log)
    lines: list[tuple[str, str]] = []
    follower = Follower({"engine": log})
    follower.read(lambda *line: lines.append(line))
    log.write_text("one\ntwo\nthr")
    follower.read(lambda *line: lines.append(line))
    with log.open("a") as file:
        file.write("ee\n")
    follower.read(lambda *line: lines.append(line))
    assert lines == [("engine", "one"), ("engine", "two"), ("engine", "three")]
    rotate(log)
    assert not log.exists() and log.with_name("engine.log.1").read_text() == "one\ntwo\nthree\n"
