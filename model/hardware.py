"""Which profile fits this machine: asks the NVIDIA driver, not torch, so that it takes no seconds."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from model.profile import ProfileError, load_profile, profile_names

CPU_PROFILE = "cpu-tiny"
_QUERY = ("--query-gpu=name", "--format=csv,noheader")


def gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs that a process started here would see; empty without a driver.

    `CUDA_VISIBLE_DEVICES` counts: an empty value, or -1, hides them all.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    binary = shutil.which("nvidia-smi")
    if binary is None:
        return []
    selected = () if visible is None else (f"--id={visible}",)
    try:
        found = subprocess.run(
            [binary, *selected, *_QUERY], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]


def choose_profile(gpus: Sequence[str]) -> str:
    """Name of the profile made for a host with these GPUs; raises `ProfileError` when none is."""
    if not gpus:
        return CPU_PROFILE
    candidates = [load_profile(name) for name in profile_names()]
    fitting = [
        profile
        for profile in candidates
        if profile.gpu is not None and profile.gpus is not None
        if profile.gpu.lower() in gpus[0].lower() and profile.gpus <= len(gpus)
    ]
    if not fitting:
        known = ", ".join(f"{p.name} ({p.gpus} x {p.gpu})" for p in candidates if p.gpu is not None)
        raise ProfileError(
            f"no profile for {len(gpus)} x {gpus[0]}; there are {known}. Pass --profile with one of them, "
            f"the path of your own .toml file, or {CPU_PROFILE} for the small model on the CPU"
        )
    return max(fitting, key=lambda profile: profile.gpus or 0).name
