"""Describes the machine without naming it. Standard library only."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from models import REPO_ROOT


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"


def memory_gib() -> float:
    """Physical memory in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def has_nvidia_gpu() -> bool:
    """Whether the system's own tool finds one."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def describe() -> dict[str, str]:
    """What a reader needs to judge the times: processor, cores, memory, system, load before the run."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cores": str(available),
        "memory": f"{memory_gib():.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load before the run": f"{os.getloadavg()[0]:.1f}",
    }


def revision() -> str:
    """The repository's commit, marked when tracked or new files differ from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    if not commit:
        return "no commit yet"
    return f"{commit} with changes" if _git("status", "--porcelain", "--", "src") else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
