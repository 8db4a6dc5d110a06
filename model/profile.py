"""Launch profiles: the exact SGLang arguments for one kind of hardware, and why each is there.

A profile is a TOML file (`model/profiles/NAME.toml`, or any path):

    name = "cpu-tiny"                 # what it is called
    summary = "..."                   # what it serves, in a line
    device = "cpu"                    # "cpu" or "cuda"
    gpu = "H200"; gpus = 8            # cuda only: a part of the device's name, and how many on one host

    [store]                           # the HiCache backend's settings, used when a store URL is given
    timeout_s = 2.0
    prefetch_threshold_tokens = 64

    [[argument]]                      # one per argument, in the order of the command line
    flag = "--page-size"
    value = 64                        # left out for a switch; a list for a flag that takes several
    when = "always"                   # or "store" (a store URL is given), "draft" (a draft model is given)
    why = "..."

    [[environment]]                   # the same with `name` for `flag`
    [[required]]                      # a flag that only the operator can know, such as --node-rank

This module imports neither SGLang nor torch; `model.arguments` checks a command against SGLang's own parser.
"""

import json
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError

from model import kernel_sizes

PROFILES = Path(__file__).parent / "profiles"
SERVED_MODEL_NAME = "kimi-k3"
DEFAULT_PORT = 30000

When = Literal["always", "store", "draft"]
Text = Annotated[str, Field(min_length=1)]
Flag = Annotated[str, Field(pattern=r"^--[a-z0-9][a-z0-9-]*$")]
Value = StrictStr | StrictInt | StrictFloat | tuple[StrictStr, ...]


class ProfileError(ValueError):
    """A profile can't be found, read or used; the message names the profile, the field and the remedy."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Argument(_Entry):
    """One argument of `sglang.launch_server`; `value` is None for a switch."""

    flag: Flag
    value: Value | None = None
    why: Text
    when: When = "always"

    @property
    def tokens(self) -> list[str]:
        """The argument as the words of a command line."""
        if self.value is None:
            return [self.flag]
        if isinstance(self.value, tuple):
            return [self.flag, *self.value]
        return [self.flag, str(self.value)]


class Variable(_Entry):
    """One environment variable of the engine's processes."""

    name: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    value: StrictStr
    why: Text
    when: When = "always"


class Required(_Entry):
    """A flag that differs from host to host, so that the operator has to pass it."""

    flag: Flag
    why: Text


class Store(_Entry):
    """Settings of `cache_store.backend.RedisStore`."""

    timeout_s: Annotated[float, Field(gt=0)]
    prefetch_threshold_tokens: Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start an engine: `argv`, and what `env` adds to the environment of the caller."""

    argv: list[str]
    env: dict[str, str]
    reasons: tuple[Argument | Variable, ...] = ()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the process: `base` overlaid with `env`."""
        return {**base, **self.env}

    def shell(self) -> str:
        """The command as lines that can be pasted into a shell, one argument a line."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        head, rest = self.argv[:3], self.argv[3:]
        lines = [*words, shlex.join(head)]
        for word in rest:
            if word.startswith("--"):
                lines.append(f"  {shlex.quote(word)}")
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n".join(lines)


class Profile(_Entry):
    """A launch profile as read from its file (format: this module's docstring)."""

    name: Text
    summary: Text
    device: Literal["cpu", "cuda"]
    gpu: Text | None = None
    gpus: Annotated[int, Field(gt=0)] | None = None
    store: Store
    argument: tuple[Argument, ...]
    environment: tuple[Variable, ...] = ()
    required: tuple[Required, ...] = ()

    def check_integrity(self) -> None:
        """Raise `ProfileError` where two entries contradict each other."""
        for kind, names in (
            ("argument", [entry.flag for entry in (*self.argument, *self.required)]),
            ("environment", [entry.name for entry in self.environment]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ProfileError(f"profile {self.name}: {kind} {twice[0]} is given twice; keep one of them")
        owned = {"--model-path", "--host", "--port", "--served-model-name"} | set(_STORE_FLAGS)
        for entry in self.argument:
            if entry.flag in owned:
                raise ProfileError(
                    f"profile {self.name}: argument {entry.flag} is set for every profile alike; remove it"
                )
        if (self.gpu is None) != (self.device == "cpu") or (self.gpus is None) != (self.device == "cpu"):
            raise ProfileError(f"profile {self.name}: gpu and gpus belong to device = 'cuda', and both do")

    def check(self, model: Path, draft: Path | None, extra: Sequence[str]) -> None:
        """Raise `ProfileError` for a K3 of sizes that a GPU can't compute, and when `extra` lacks an argument
        that the profile requires."""
        if self.device == "cuda" and (complaint := kernel_sizes.complaint(model, draft)) is not None:
            raise ProfileError(f"profile {self.name}: {complaint}")
        given = _flags(extra)
        for entry in self.required:
            if entry.flag not in given:
                raise ProfileError(
                    f"profile {self.name} needs {entry.flag} ({entry.why}): pass it after '--', "
                    f"as in: longhaul engine --profile {self.name} ... -- {entry.flag} VALUE"
                )

    def command(
        self,
        model: Path,
        port: int,
        *,
        store_url: str | None = None,
        draft: Path | None = None,
        extra: Sequence[str] = (),
    ) -> EngineCommand:
        """The command that serves `model` on `port`.

        With `store_url` (redis://host:port/0 or unix:///path) the host tier and the storage backend are on;
        with `draft` (a DSpark checkpoint) speculative decoding is. `extra` are further SGLang arguments: one
        that the profile has too replaces the profile's. Raises `ProfileError` as `check` does.
        """
        self.check(model, draft, extra)
        given = _flags(extra)
        used: set[When] = {"always"}
        if store_url is not None:
            used.add("store")
        if draft is not None:
            used.add("draft")
        arguments = [
            *_common(model, port),
            *(entry for entry in self.argument if entry.when in used),
            *(_storage(self.store, store_url) if store_url is not None else ()),
            *(_draft(draft) if draft is not None else ()),
        ]
        kept = [entry for entry in arguments if entry.flag not in given]
        variables = [entry for entry in self.environment if entry.when in used]
        return EngineCommand(
            argv=[
                *(sys.executable, "-m", "sglang.launch_server"),
                *(word for entry in kept for word in entry.tokens),
                *extra,
            ],
            env={entry.name: entry.value for entry in variables},
            reasons=(*variables, *kept),
        )


_STORE_FLAGS = ("--hicache-storage-backend", "--hicache-storage-backend-extra-config")


def _flags(words: Sequence[str]) -> set[str]:
    return {word.split("=", 1)[0] for word in words if word.startswith("--")}


def _common(model: Path, port: int) -> list[Argument]:
    return [
        Argument(flag="--model-path", value=str(model), why="the checkpoint to serve"),
        Argument(
            flag="--served-model-name",
            value=SERVED_MODEL_NAME,
            why="the name that clients ask for, whatever the path",
        ),
        Argument(flag="--host", value="127.0.0.1", why="only the gateway talks to the engine"),
        Argument(flag="--port", value=port, why="where the gateway finds it"),
    ]


def _storage(store: Store, url: str) -> list[Argument]:
    config = {
        "backend_name": "longhaul",
        "module_path": "cache_store.backend",
        "class_name": "RedisStore",
        "interface_v1": 1,
        "url": url,
        "timeout_s": store.timeout_s,
        "prefetch_threshold": store.prefetch_threshold_tokens,
        "hicache_storage_pass_prefix_keys": True,
    }
    return [
        Argument(
            flag=_STORE_FLAGS[0],
            value="dynamic",
            why="loads a storage backend that SGLang does not come with",
        ),
        Argument(
            flag=_STORE_FLAGS[1],
            value=json.dumps(config, separators=(",", ":")),
            why="which class and server, how long one operation may take, and the shortest prefix to fetch",
        ),
    ]


def _draft(path: Path) -> list[Argument]:
    return [
        Argument(flag="--speculative-algorithm", value="DSPARK", why="the draft is a DSpark checkpoint"),
        Argument(
            flag="--speculative-draft-model-path",
            value=str(path),
            why="its block size is read from its config.json",
        ),
    ]


def profile_names() -> list[str]:
    """Names of the profiles that come with Longhaul."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_profile(name_or_path: str | Path) -> Profile:
    """Read a profile by name, or from a path that ends in `.toml`; raises `ProfileError`."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = PROFILES / f"{name_or_path}.toml"
        if not path.is_file():
            raise ProfileError(
                f"no profile named {str(name_or_path)!r}; there are {', '.join(profile_names())}, "
                "or give the path of a .toml file"
            )
    try:
        profile = Profile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ProfileError(f"profile {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {path} is not valid TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ProfileError(f"profile {path}: {_field(first['loc'])}: {first['msg']}") from error
    profile.check_integrity()
    return profile


def _field(location: Sequence[int | str]) -> str:
    """`('argument', 3, 'why')` as `argument[3].why`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")
