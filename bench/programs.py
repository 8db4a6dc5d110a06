"""Programs that measurements run beside ours, each in an environment of its own in the state directory."""

import shutil
import subprocess
from pathlib import Path

from bench.engines import note
from model.state import state_directory


def installed(name: str, requirement: str) -> Path:
    """The program `name` of a pinned `requirement`, installed from PyPI where it is missing."""
    home = state_directory() / "bench" / name
    program = home / "bin" / name
    if not program.exists():
        uv = shutil.which("uv") or str(Path(".uv/bin/uv").absolute())
        note(f"installing {requirement} into {home}")
        subprocess.run([uv, "venv", "--quiet", "--clear", str(home)], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", str(home), requirement], check=True)
    return program.absolute()
