"""Finds profiles, shipped with carrywave or in files, and lists links with their manufacturers' published figures.

Published bandwidths are those of the hardware; programs achieve less. Latencies are assumptions: what a message between two processes
usually takes, including the kernel launch. `Link.source` marks both, and a measured link is always preferable.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from carrywave import __version__
from carrywave.errors import PlanError
from carrywave.plan.cost.profile import Link, Profile, Transport

PROFILE = "CARRYWAVE_PROFILE"  # environment variable: the file or name of the profile to plan with


def _published(latency_microseconds: float, gigabytes_per_second: float, publication: str, transport: Transport = "") -> Link:
    source = f"published: {publication}; latency {latency_microseconds:g} us assumed"
    return Link(latency_microseconds * 1e-6, gigabytes_per_second * 1e9, source, transport)


# Bandwidths are for one direction; figures published for both directions together are halved.
LINKS: dict[str, Link] = {
    "nvlink3": _published(5, 300, "NVIDIA A100 data sheet, 600 GB/s a GPU in both directions together", "device memory"),
    "nvlink4": _published(5, 450, "NVIDIA H100 and H200 data sheets, 900 GB/s a GPU in both directions together", "device memory"),
    "nvlink5": _published(5, 900, "NVIDIA B200 data sheet, 1,800 GB/s a GPU in both directions together", "device memory"),
    "pcie4": _published(10, 31.5, "PCI-SIG, PCI Express 4.0, 16 lanes of 16 GT/s in 128b/130b, a GPU", "device memory"),
    "pcie5": _published(10, 63, "PCI-SIG, PCI Express 5.0, 16 lanes of 32 GT/s in 128b/130b, a GPU", "device memory"),
    "infiniband-hdr": _published(10, 25, "NVIDIA ConnectX-6 data sheet, 200 Gb/s a port"),
    "infiniband-ndr": _published(10, 50, "NVIDIA ConnectX-7 data sheet, 400 Gb/s a port"),
    "ethernet-10g": _published(50, 1.25, "IEEE 802.3ae, 10 Gb/s a port"),
    "ethernet-25g": _published(40, 3.125, "IEEE 802.3by, 25 Gb/s a port"),
    "ethernet-100g": _published(30, 12.5, "IEEE 802.3ba, 100 Gb/s a port"),
}


def names() -> list[str]:
    """Names of the profiles shipped with carrywave."""
    folder = _folder()
    return sorted(part.name.removesuffix(".json") for part in folder.iterdir() if part.name.endswith(".json")) if folder.is_dir() else []


def shipped(name: str) -> Profile:
    """A profile shipped with carrywave, by name."""
    if name not in names():
        raise PlanError(f"profile {name} not found; {_remedy()}")
    with (_folder() / f"{name}.json").open(encoding="utf-8") as file:
        return Profile.of(json.load(file), name)


def find_profile(text: str) -> Profile:
    """The shipped profile of this name, or the one in this file."""
    if text in names():
        return shipped(text)
    if os.sep in text or text.endswith(".json") or Path(text).is_file():
        profile = Profile.read(text)
        if "carrywave" in profile.versions:  # reject another version's: its kernels may have been different
            profile.check_fresh(profile.hardware, {"carrywave": __version__})
        return profile
    raise PlanError(f"profile {text} not found; {_remedy()}")


def _folder() -> Traversable:
    return files("carrywave.plan") / "profiles"


def _remedy() -> str:
    shipped_names = names()
    return f"use {', '.join(shipped_names)}, or a file that carrywave measured" if shipped_names else "use a file that carrywave measured"
