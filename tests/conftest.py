from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from bench.engines import Engine, running_engine

# How long an example takes says nothing on a busy machine.
settings.register_profile("longhaul", deadline=None)
settings.load_profile("longhaul")


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
