"""The machine that figures were measured on."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """What the figures depend on; the load is that of other work, taken before ours starts."""
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
    }


def machine_line(machine: dict[str, Any]) -> str:
    load = machine["load_average"]
    other = "" if load is None else f", load average {load:.2f} before the start"
    return f"{machine['cpus']} processors{other}, torch {machine['torch']}"
