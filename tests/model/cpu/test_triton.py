"""Our operators against SGLang's own Triton kernels, run by Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("triton_comparison.py")
ROUNDING = 2e-6


@pytest.mark.sglang
def test_operators_equal_sglangs_kernels() -> None:
    env = {name: value for name, value in os.environ.items() if name != "SGLANG_PLATFORM"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) >= 20
    assert {name: value for name, value in differences.items() if not value <= ROUNDING} == {}
