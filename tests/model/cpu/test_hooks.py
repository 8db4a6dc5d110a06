"""The hook table against the installed SGLang, and what happens when one of its rows doesn't hold."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from model.cpu.registry import (
    ABSENT,
    Hook,
    HookError,
    Kind,
    apply,
    check,
    check_version,
    confirm,
    describe,
    resolve,
)

MODULE = "longhaul_hook_target.inner"


@pytest.fixture
def target() -> Iterator[types.ModuleType]:
    """A module with a function and a class to hook, importable while the test runs."""
    parent, module = types.ModuleType("longhaul_hook_target"), types.ModuleType(MODULE)

    def double(value: int, *, times: int = 2) -> int:
        return value * times

    class Counter:
        ready = True

        def add(self, amount: int) -> int:
            return amount + 1

    module.double, module.Counter = double, Counter  # type: ignore[attr-defined]
    parent.inner = module  # type: ignore[attr-defined]
    sys.modules["longhaul_hook_target"], sys.modules[MODULE] = parent, module
    yield module
    del sys.modules["longhaul_hook_target"], sys.modules[MODULE]
    from sglang.srt.plugins.hook_registry import HookRegistry

    for name in [name for name in HookRegistry._hooks if name.startswith("longhaul_hook_target")]:
        del HookRegistry._hooks[name]
        HookRegistry._patched.discard(name)


DOUBLE = "(value: int, *, times: int = 2) -> int"


def hook(name: str, kind: Kind, replacement: Any, expected: str) -> Hook:
    return Hook(f"{MODULE}.{name}", kind, replacement, expected, "a test")


def test_replace_around_and_set_take_effect(target: Any) -> None:
    def halve(value: int, *, times: int = 2) -> int:
        return value // times

    def log(original: Any, self: Any, amount: int) -> int:
        return original(self, amount) * 100

    apply(
        [
            hook("double", Kind.REPLACE, halve, DOUBLE),
            hook("Counter.add", Kind.AROUND, log, "(self, amount: int) -> int"),
            hook("Counter.ready", Kind.SET, False, "True"),
            hook("added", Kind.SET, halve, ABSENT),
        ]
    )
    assert target.double(8) == 4
    assert target.Counter().add(1) == 200
    assert target.Counter.ready is False
    assert target.added(9, times=3) == 3


@pytest.mark.parametrize(
    ("name", "expected", "found"),
    [
        ("double", "(value: int) -> int", DOUBLE),
        ("Counter.ready", "False", "True"),
        ("missing", "(value: int) -> int", ABSENT),
        ("double", ABSENT, DOUBLE),
    ],
)
def test_a_changed_target_is_named_with_both_forms(target: Any, name: str, expected: str, found: str) -> None:
    before = target.double
    with pytest.raises(HookError) as error:
        apply([hook(name, Kind.SET, None, expected)])
    message = str(error.value)
    assert f"{MODULE}.{name}" in message
    assert f"expected {expected}" in message
    assert f"found    {found}" in message
    assert target.double is before


def test_nothing_is_changed_when_one_of_many_doesnt_fit(target: Any) -> None:
    before = target.double
    with pytest.raises(HookError):
        apply(
            [
                hook("double", Kind.REPLACE, before, DOUBLE),
                hook("Counter.add", Kind.REPLACE, before, "(self) -> int"),
            ]
        )
    assert target.double is before


def test_a_missing_module_is_a_hook_error() -> None:
    with pytest.raises(HookError, match=r"hook longhaul_nowhere\.module\.function"):
        check([Hook("longhaul_nowhere.module.function", Kind.REPLACE, print, "()", "a test")])


def test_a_hook_that_didnt_take_is_found(target: Any) -> None:
    """SGLang logs and swallows what goes wrong while it applies hooks; here it never gets to apply one."""
    row = hook("double", Kind.REPLACE, print, DOUBLE)
    with pytest.raises(HookError, match="not applied"):
        confirm(row, target.double)
    wrong = hook("double", Kind.SET, print, DOUBLE)
    with pytest.raises(HookError, match="not applied"):
        confirm(wrong, target.double)


def test_an_unrelated_function_in_place_of_the_target_isnt_taken_for_the_hook(target: Any) -> None:
    original = target.double
    target.double = lambda value: value
    with pytest.raises(HookError, match="not applied"):
        confirm(hook("double", Kind.REPLACE, print, DOUBLE), original)


def test_the_version_is_asserted() -> None:
    check_version("0.5.23")
    with pytest.raises(HookError, match=r"sglang 0\.5\.23 is installed, the CPU platform knows 0\.6\.0"):
        check_version("0.6.0")


def test_describe_tells_kinds_of_values_apart() -> None:
    assert describe(True) == "True"
    assert describe(None) == "None"
    assert describe(ABSENT) == ABSENT
    assert describe(object()) == "<object>"
    assert resolve("sys.byteorder.nothing")[2] is ABSENT


# What follows runs SGLang's own loader, which loads plug-ins once and here ends its process: every scenario
# runs in a fork of a process that has imported SGLang, since importing it takes most of the time.

SCENARIOS = {
    "worker": (
        "hooks.this_process = lambda: hooks.Process.WORKER",
        "from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS\n"
        "from sglang.srt.layers.attention.linear import kda_backend\n"
        "assert 'longhaul_cpu' in ATTENTION_BACKENDS\n"
        "assert kda_backend.causal_conv1d_fn.__wrapped__ is not None\n"
        "assert not kda_backend.TritonKDAKernel.supports_packed_decode",
    ),
    "detokenizer": (
        "hooks.this_process = lambda: hooks.Process.DETOKENIZER\nhooks.SGLANG_VERSION = 'unread'",
        "assert not hasattr(speculative_hook._handle_dspark, '__wrapped__')",
    ),
    "version": ("hooks.SGLANG_VERSION = '0.6.0'", ""),
    "signature": ("speculative_hook._handle_dspark = lambda server_args, device: None", ""),
    "worker_signature": (
        "import sglang.srt.layers.attn_residual as residual\nresidual._mix_fused = lambda prefix, bank: None",
        "",
    ),
    "unapplied": (
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "def fail(target, hooks):\n"
        "    raise RuntimeError('no room')\n"
        "HookRegistry._apply_target = fail",
        "",
    ),
    "gpu": ("import torch\ntorch.cuda.is_available = lambda: True", ""),
}

RUNNER = """
import json, os, sys
import model.cpu.hooks as hooks
import sglang.srt.arg_groups.speculative_hook as speculative_hook
from sglang.srt.plugins import load_plugins
for name, (before, after) in json.load(sys.stdin).items():
    child = os.fork()
    if child == 0:
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 2)
        status = 1
        try:
            exec(before)
            load_plugins()
            exec(after)
            status = 0
        except SystemExit as stop:
            status = stop.code
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        os._exit(status)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and standard error of each scenario."""
    folder = tmp_path_factory.mktemp("scenarios")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SGLANG_PLATFORM": "longhaul_cpu"}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        cwd=folder,
        env=env,
        input=json.dumps(SCENARIOS),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.split(" ")[0] in SCENARIOS]
    assert len(lines) == len(SCENARIOS), done.stdout
    return {name: (int(status), (folder / name).read_text()) for name, status in lines}


@pytest.mark.sglang
@pytest.mark.parametrize("process", ["worker", "detokenizer"])
def test_processes_get_what_they_need(outcomes: dict[str, tuple[int, str]], process: str) -> None:
    """A worker all hooks, each proved to be in place; the detokenizer none."""
    assert outcomes[process][0] == 0, outcomes[process][1]


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("scenario", "messages"),
    [
        ("version", ["longhaul: sglang 0.5.23 is installed, the CPU platform knows 0.6.0"]),
        (
            "signature",
            [
                "hook sglang.srt.arg_groups.speculative_hook._handle_dspark: the target has changed",
                "expected (server_args: 'ServerArgs') -> 'None'",
                "found    (server_args, device)",
            ],
        ),
        (
            "worker_signature",
            [
                "hook sglang.srt.layers.attn_residual._mix_fused: the target has changed",
                "found    (prefix, bank)",
            ],
        ),
        ("unapplied", ["hook sglang.srt.arg_groups.speculative_hook._handle_dspark: not applied"]),
        ("gpu", ["a GPU is visible: set CUDA_VISIBLE_DEVICES="]),
    ],
)
def test_what_doesnt_hold_ends_the_process(
    outcomes: dict[str, tuple[int, str]], scenario: str, messages: list[str]
) -> None:
    status, text = outcomes[scenario]
    assert status == 3
    for message in messages:
        assert message in text


@pytest.mark.sglang
def test_the_plugin_does_nothing_unless_selected() -> None:
    script = (
        "import sys\nfrom model import plugin\nplugin.register()\n"
        "assert 'torch' not in sys.modules and 'sglang' not in sys.modules\nprint('idle')"
    )
    env = {name: value for name, value in os.environ.items() if name != "SGLANG_PLATFORM"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "idle"


def test_the_platform_is_active_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from model.cpu.platform import activate

    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "longhaul_cpu")
    assert activate() == "model.cpu.platform:CpuPlatform"


def test_an_unreadable_memory_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from model.cpu.platform import CpuPlatform

    monkeypatch.setenv("LONGHAUL_CPU_MEMORY_GIB", "much")
    with pytest.raises(ValueError, match="LONGHAUL_CPU_MEMORY_GIB is 'much'"):
        CpuPlatform().get_device_total_memory()
    monkeypatch.setenv("LONGHAUL_CPU_MEMORY_GIB", "0.5")
    assert CpuPlatform().get_device_total_memory() == 1 << 29


@pytest.mark.parametrize(
    "field",
    ["enable_linear_replayssm", "enable_linear_replayssm_spec", "speculative_use_block_verification"],
)
def test_switches_without_an_operator_are_refused_at_the_start(field: str) -> None:
    from sglang.srt.server_args import ServerArgs

    from model.cpu.platform import CpuPlatform

    arguments = ServerArgs(model_path="unread")
    CpuPlatform().apply_server_args_defaults(arguments)
    assert arguments.enable_multimodal is False
    setattr(arguments, field, True)
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} isn't served by the CPU platform"):
        CpuPlatform().apply_server_args_defaults(arguments)
