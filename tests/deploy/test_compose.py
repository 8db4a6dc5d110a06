"""The Compose file, as Compose itself reads it."""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from model import command as model_command
from model import engine as model_engine
from model.profile import load_profile
from service import gateway as service_gateway

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
PROFILES = {
    "cpu": {"gateway", "model", "engine-cpu", "blobs", "ledger", "prometheus"},
    "gpu": {"gateway", "engine-gpu", "blobs", "ledger", "prometheus"},
}
OWN_IMAGES = {"longhaul-gateway", "longhaul-cpu", "longhaul-engine"}

Service = dict[str, Any]


@functools.cache
def compose(profile: str, overlay: str | None = None, **settings: str) -> dict[str, Any]:
    """The file, with another over it, for one profile and the given settings, interpolated and merged."""
    # Whatever the machine sets must not leak in, nor a .env beside the file.
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **settings}
    binary = Path(sys.executable).with_name("docker-compose")
    arguments = [
        "--file",
        COMPOSE,
        *(("--file", COMPOSE.with_name(overlay)) if overlay else ()),
        "--env-file",
        os.devnull,
        "--profile",
        profile,
        "config",
        "--format",
        "json",
    ]
    done = subprocess.run(
        [binary, *arguments], check=False, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def services() -> list[Any]:
    return [
        pytest.param(profile, name, id=f"{profile}-{name}")
        for profile, names in PROFILES.items()
        for name in sorted(names)
    ]


def one_shots(document: dict[str, Any]) -> set[str]:
    """Services that others wait for to end."""
    return {
        name
        for service in document["services"].values()
        for name, wait in service.get("depends_on", {}).items()
        if wait["condition"] == "service_completed_successfully" and name in document["services"]
    }


def seconds(duration: str) -> float:
    parts = re.findall(r"(\d+)(h|m|s)", duration)
    return sum(int(count) * {"h": 3600, "m": 60, "s": 1}[unit] for count, unit in parts)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_starts_its_services(profile: str) -> None:
    assert compose(profile)["services"].keys() == PROFILES[profile]


def test_without_a_profile_nothing_starts() -> None:
    assert not compose("").get("services")


@pytest.mark.parametrize(("profile", "name"), services())
def test_a_service_is_watched_restarted_bounded_and_pinned(profile: str, name: str) -> None:
    document = compose(profile)
    service = document["services"][name]
    if name in one_shots(document):
        assert service["restart"] == "on-failure:3"
    else:
        assert service["restart"] == "unless-stopped"
        health = service["healthcheck"]
        assert health["test"][0] in ("CMD", "CMD-SHELL") and len(health["test"]) > 1
        assert seconds(health["timeout"]) < seconds(health["interval"])
    image, _, tag = service["image"].rpartition(":")
    assert image and re.fullmatch(r"v?\d+\.\d+\.\d+", tag)
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    if name != "engine-gpu":
        assert int(service["deploy"]["resources"]["limits"]["memory"]) > 0


def test_our_images_carry_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    found = {
        service["image"]
        for profile in PROFILES
        for service in compose(profile)["services"].values()
        if "build" in service
    }
    assert found == {f"{image}:{version}" for image in OWN_IMAGES}


def test_what_is_built_are_targets_of_the_dockerfile() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    for profile in PROFILES:
        for service in compose(profile)["services"].values():
            if "build" in service:
                assert Path(service["build"]["context"]) == ROOT
                assert service["build"]["target"] in stages
                assert service["image"].split(":")[0] == f"longhaul-{service['build']['target']}"


@pytest.mark.parametrize("profile", PROFILES)
def test_only_gateway_and_prometheus_are_reachable_and_from_this_machine_alone(profile: str) -> None:
    document = compose(profile)
    published = {
        name: [port["host_ip"] for port in service["ports"]]
        for name, service in document["services"].items()
        if "ports" in service
    }
    assert published == {"gateway": ["127.0.0.1"], "prometheus": ["127.0.0.1"]}
    assert document["networks"]["back"]["internal"] is True
    for name in PROFILES[profile] - {"gateway", "prometheus", "model"}:
        assert document["services"][name]["networks"].keys() == {"back"}
    assert document["services"]["prometheus"]["networks"].keys() == {"front"}


@pytest.mark.parametrize("profile", PROFILES)
def test_exactly_one_service_answers_as_engine(profile: str) -> None:
    aliases = [
        name
        for name, service in compose(profile)["services"].items()
        if "engine" in ((service.get("networks") or {}).get("back") or {}).get("aliases", [])
    ]
    assert aliases == [f"engine-{profile}"]


@pytest.mark.parametrize(("profile", "name"), services())
def test_volumes_have_names_and_files_exist(profile: str, name: str) -> None:
    document = compose(profile)
    for mount in document["services"][name].get("volumes", []):
        if mount["type"] == "volume":
            assert mount["source"] in document["volumes"]
        else:
            assert mount["type"] == "bind" and mount["read_only"] is True
            assert Path(mount["source"]).exists(), mount


def test_the_ledger_is_kept_and_the_blobs_are_not() -> None:
    found = compose("cpu")["services"]
    assert [mount["source"] for mount in found["ledger"]["volumes"] if mount["target"] == "/data"] == [
        "ledger"
    ]
    assert "/data" in found["blobs"]["tmpfs"]


def test_the_gateway_waits_for_the_ledger_but_for_no_engine() -> None:
    waits = compose("cpu")["services"]["gateway"]["depends_on"]
    assert waits["ledger"]["condition"] == "service_healthy"
    assert not [name for name in waits if name.startswith("engine")]


def parse(module: Any, command: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    return parser.parse_args(command)


def test_the_gateway_understands_its_command() -> None:
    found = compose("cpu")["services"]["gateway"]
    command = found["command"]
    assert command[0] == "gateway"
    args = parse(service_gateway, command[1:])
    assert (args.engine, args.ledger) == (["http://engine:30000"], "redis://ledger:6379/0")
    assert (args.host, args.port, args.tenants) == ("0.0.0.0", 8000, None)
    assert args.model == Path("/models/k3-small")
    assert seconds(found["stop_grace_period"]) > args.drain_s


def test_a_second_engine_stands_beside_the_first() -> None:
    text = COMPOSE.with_name("compose.replica.yaml").read_text()
    option = re.search(r'GATEWAY_OPTIONS="(.*)"', text)
    assert option is not None
    found = compose("cpu", "compose.replica.yaml", GATEWAY_OPTIONS=option[1])["services"]
    first, second = found["engine-cpu"], found["engine-cpu-2"]
    assert first["networks"] == {"back": {"aliases": ["engine"]}}
    assert second["networks"] == {"back": {"aliases": ["engine-2"]}}
    assert first["command"] == second["command"]
    written = [
        {volume["source"] for volume in each["volumes"] if not volume.get("read_only")}
        for each in (first, second)
    ]
    assert written == [{"engine"}, {"engine-2"}]
    args = parse(service_gateway, found["gateway"]["command"][1:])
    assert args.engine == ["http://engine:30000", "http://engine-2:30000"]


def test_a_tenants_file_and_models_of_this_machine_reach_the_gateway(tmp_path: Path) -> None:
    tenants = ROOT / "deploy" / "tenants.example.toml"
    document = compose("gpu", TENANTS_FILE=str(tenants), MODELS_DIR=str(tmp_path), MODEL_NAME="Kimi-K3")
    gateway = document["services"]["gateway"]
    args = parse(service_gateway, gateway["command"][1:])
    mounts = {mount["target"]: mount for mount in gateway["volumes"]}
    assert mounts[str(args.tenants)]["source"] == str(tenants)
    assert mounts["/models"]["source"] == str(tmp_path)
    assert args.model == Path("/models/Kimi-K3")


@pytest.mark.parametrize(
    ("profile", "settings", "launch_profile", "path"),
    [
        ("cpu", {}, "cpu-tiny", "/models/k3-small"),
        ("gpu", {"ENGINE_PROFILE": "h200-slice", "MODEL_NAME": "K3"}, "h200-slice", "/models/K3"),
    ],
)
def test_the_engine_understands_its_command(
    profile: str, settings: dict[str, str], launch_profile: str, path: str
) -> None:
    command = compose(profile, **settings, ENGINE_ARGUMENTS="--log-level debug")["services"][
        f"engine-{profile}"
    ]["command"]
    assert command[0] == "engine"
    args = parse(model_engine, command[1:])
    assert (args.profile, args.model, args.store_url) == (launch_profile, Path(path), "redis://blobs:6379/0")
    # SGLang listens on the loopback interface by its profile: from another container nobody would reach it.
    assert args.extra == ["--host", "0.0.0.0", "--log-level", "debug"]
    profile_ = load_profile(args.profile)
    argv = profile_.command(
        args.model, args.port, store_url=args.store_url, draft=None, extra=args.extra
    ).argv
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--host"] == ["0.0.0.0"]


def test_the_small_model_is_written_where_the_others_read_it() -> None:
    found = compose("cpu")["services"]
    args = parse(model_command, found["model"]["command"][1:])
    assert args.output == Path("/models/k3-small")
    for name in ("model", "engine-cpu", "gateway"):
        assert [mount["source"] for mount in found[name]["volumes"] if mount["target"] == "/models"] == [
            "models"
        ]


def test_every_setting_is_documented_with_its_default() -> None:
    text = COMPOSE.read_text()
    used = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text))
    used |= {name: "" for name in re.findall(r"\$\{([A-Z_]+):\+", text) if name not in used}
    example = (COMPOSE.parent / ".env.example").read_text()
    documented = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", example, re.MULTILINE))
    # Examples rather than defaults: what the default does stands beside them.
    shown = {"COMPOSE_PROFILES", "MODELS_DIR", "MODEL_NAME", "TENANTS_FILE"}
    assert documented.keys() == used.keys() | {"COMPOSE_PROFILES"}
    assert {name: value for name, value in documented.items() if name not in shown} == {
        name: value for name, value in used.items() if name not in shown
    }


def test_prometheus_asks_the_gateway() -> None:
    found = compose("cpu")["services"]["prometheus"]
    (mount,) = [mount for mount in found["volumes"] if mount["target"] == "/etc/prometheus/prometheus.yml"]
    jobs = yaml.safe_load(Path(mount["source"]).read_text())["scrape_configs"]
    (job,) = [job for job in jobs if job["job_name"] == "longhaul"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["gateway:8000"]}]
