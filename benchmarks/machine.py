"""What a result depends on besides the command: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "numpy", "loco-compile")


def machine_facts() -> dict[str, object]:
    """Return processor, usable cores and threads of each process."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def num_cores() -> int:
    """Return the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def version_facts() -> dict[str, str]:
    """Return the versions of Python, the packages that matter, and the commit."""
    facts = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except ModuleNotFoundError:  # PackageNotFoundError: Triton has no wheel on every system
            facts[package] = "not installed"
    return {**facts, "commit": _commit()}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _commit() -> str:
    """Return the repository's commit, marked if files differ from it; "unknown" outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
