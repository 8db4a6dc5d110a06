import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_process import RedisProcess


@pytest.fixture
def redis_process() -> Iterator[RedisProcess]:
    # Not tmp_path: a socket's path has room for 107 bytes.
    with tempfile.TemporaryDirectory(prefix="lh") as directory:
        process = RedisProcess(Path(directory))
        process.start()
        try:
            yield process
        finally:
            process.kill()
