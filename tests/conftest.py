from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from bench.engines import Engine, running_engine

# How long an example takes says nothing on a busy machine. `--hypothesis-profile thorough` looks longer.
settings.register_profile("longhaul", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("longhaul")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out `test_*_sglang.py` where no test marked `sglang` runs: SGLang takes seconds to import."""
    is_left_out = "not sglang" in config.option.markexpr and collection_path.name.endswith("_sglang.py")
    return True if is_left_out else None


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The tiny checkpoint, built once."""
    from model import tiny

    return tiny.build(tiny.default_path()).path.absolute()


@pytest.fixture(scope="session")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A plain engine of the profile cpu-tiny for all tests that ask for one; nothing but its radix cache."""
    with running_engine(checkpoint, tmp_path_factory.mktemp("engine") / "engine.log") as running:
        yield running
