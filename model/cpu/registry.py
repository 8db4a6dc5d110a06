"""How a table of hooks is checked against SGLang, applied, and checked again.

SGLang's plug-in loader swallows every exception of a plug-in and serves on, half patched. So nothing here is
left to it: a target whose signature differs from the one a hook was written for, or a hook that isn't in
place afterwards, raises ``HookError``, and the plug-in ends the process.
"""

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

ABSENT = "<absent>"


class HookError(RuntimeError):
    """A hook doesn't fit the installed SGLang, or didn't take."""


class Kind(Enum):
    """What a hook does to its target."""

    REPLACE = "replace"
    AROUND = "around"
    SET = "set"


@dataclass(frozen=True, slots=True)
class Hook:
    """One change to SGLang (or torch, where SGLang takes a GPU for granted).

    Attributes:
        target: dotted path of a function, method or attribute.
        kind: REPLACE or AROUND go through SGLang's hook registry; SET assigns an attribute.
        replacement: the function, or for SET the value.
        expected: ``describe`` of the target in the SGLang that this was written for.
        why: what fails without it.
        in_server: whether the server process, which resolves the arguments, needs it as the workers do.
    """

    target: str
    kind: Kind
    replacement: Any
    expected: str
    why: str
    in_server: bool = False

    def __post_init__(self) -> None:
        assert self.target.count(".") >= 2, f"{self.target}: a full dotted path"
        assert self.why, f"{self.target}: say why"
        assert self.kind is Kind.SET or callable(self.replacement), f"{self.target}: not callable"


def describe(value: object) -> str:
    """Text that changes when a target's calling form does: a signature, or type and value."""
    if value is ABSENT:
        return ABSENT
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    try:
        return str(inspect.signature(value))  # pyright: ignore[reportArgumentType]  # TypeError is handled
    except (TypeError, ValueError):
        return f"<{type(value).__name__}>"


def resolve(target: str) -> tuple[object, str, object]:
    """Owner, attribute name and current value of a target; the value is ``ABSENT`` when there is none."""
    path, name = target.rsplit(".", 1)
    try:
        owner = pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise HookError(f"hook {target}: {path} can't be found ({error})") from error
    return owner, name, getattr(owner, name, ABSENT)


def check_version(expected: str) -> None:
    """Refuse any SGLang but the one whose insides the hooks know."""
    from importlib.metadata import version

    found = version("sglang")
    if found != expected:
        raise HookError(
            f"sglang {found} is installed, the CPU platform knows {expected}: pip install sglang=={expected}"
        )


def check(hooks: Iterable[Hook]) -> None:
    """Compare every target with what its hook expects."""
    for hook in hooks:
        found = describe(resolve(hook.target)[2])
        if found != hook.expected:
            raise HookError(
                f"hook {hook.target}: the target has changed\n  expected {hook.expected}\n  found    {found}"
            )


def apply(hooks: Iterable[Hook]) -> None:
    """Check all targets, put every hook in place, and prove that each is."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    chosen = list(hooks)
    check(chosen)
    originals: dict[str, object] = {}
    for hook in chosen:
        owner, name, original = resolve(hook.target)
        originals[hook.target] = original
        if hook.kind is Kind.SET:
            setattr(owner, name, hook.replacement)
        else:
            kind = HookType.REPLACE if hook.kind is Kind.REPLACE else HookType.AROUND
            HookRegistry.register(hook.target, hook.replacement, kind)
    HookRegistry.apply_hooks()
    for hook in chosen:
        confirm(hook, originals[hook.target])


def confirm(hook: Hook, original: object) -> None:
    """Prove that a hook is in place of ``original``."""
    current = resolve(hook.target)[2]
    if hook.kind is Kind.SET:
        applied = current is hook.replacement
    else:
        applied = current is not original and _wraps(current, original)
    if not applied:
        raise HookError(
            f"hook {hook.target}: not applied\n  expected a {hook.kind.value} of {describe(original)}\n"
            f"  found    {describe(current)}; SGLang's log above names the cause"
        )


def _wraps(value: object, original: object) -> bool:
    """Whether ``original`` lies under ``value`` in the chain that functools.wraps leaves."""
    seen: Callable[..., Any] | None = getattr(value, "__wrapped__", None)
    while seen is not None:
        if seen is original:
            return True
        seen = getattr(seen, "__wrapped__", None)
    return False
