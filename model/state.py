"""Where Longhaul keeps what it writes on one machine: models, Redis data, logs."""

import os
from pathlib import Path

VARIABLE = "LONGHAUL_STATE"


def state_directory(given: Path | None = None) -> Path:
    """The state directory as an absolute path: `given`, else `$LONGHAUL_STATE`, else `./.state`."""
    return (given or Path(os.environ.get(VARIABLE) or ".state")).expanduser().absolute()
