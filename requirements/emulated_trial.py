"""Tries a wheel for aarch64 on a machine of another kind, with an emulator and a Python for aarch64.

It runs what `requirements.wheel_trial` runs of the library itself: a server that is served, a save and a load.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from requirements.wheel_trial import EXAMPLE, TrialError

__all__ = ["MACHINE", "MINOR", "TrialError", "find_emulator", "try_emulated"]

MACHINE = "aarch64"
MINOR = 11
"""Minor version of the Python that `emulator.sh` unpacks."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
SCRIPT = """
import os, platform, runpy, sys
from kvoffload import native
sys.executable = sys.argv[1]  # the kernel of this machine starts no program for aarch64
sys.path.insert(0, os.path.dirname(sys.argv[2]))
print(platform.machine(), native.sha256(b"").hex(), flush=True)
runpy.run_path(sys.argv[2], run_name="__main__")
"""
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def find_emulator(folder: Path) -> bool:
    """Fetches the emulator into a folder unless it is there. False: it cannot be had here."""
    if not (folder / "made").is_file():
        command = ["bash", str(Path(__file__).parent / "emulator.sh"), str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return True


def write_python(emulator: Path, packages: Path, file: Path) -> Path:
    """Writes a command that is this Python, with these packages."""
    root, qemu = emulator / "root", emulator / "qemu/usr/bin/qemu-aarch64-static"
    lines = [
        "#!/bin/sh",
        shlex.join(["export", f"PYTHONHOME={root / 'usr'}", f"PYTHONPATH={packages}"]),
        shlex.join(["exec", str(qemu), "-L", str(root), str(root / f"usr/bin/python3.{MINOR}")]) + ' "$@"',
    ]
    file.write_text("\n".join(lines) + "\n")
    file.chmod(0o755)
    return file


def try_emulated(wheel: Path, emulator: Path) -> str:
    """Installs a wheel and what it needs for aarch64, and describes in a line what it can do. TrialError."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    pip += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", f"3.{MINOR}"]
    pip += [word for abi in (f"cp3{MINOR}", "abi3", "none") for word in ("--abi", abi)]
    pip += [word for platform in PLATFORMS for word in ("--platform", f"{platform}_{MACHINE}")]
    with tempfile.TemporaryDirectory() as name:
        packages = Path(name) / "packages"
        _run([*pip, "--target", str(packages), str(wheel)], Path(name))
        python = write_python(emulator, packages, Path(name) / "python")
        said = _run([str(python), "-c", SCRIPT, str(python), str(EXAMPLE)], Path(name)).splitlines()
    if said[0] != f"{MACHINE} {EMPTY_SHA256}":
        raise TrialError(f"the emulated {MACHINE} said {said[0]}")
    return f"  runs under an emulator; {said[-1]}"


def _run(line: list[str], folder: Path) -> str:
    """Runs a command in a folder from which Python imports nothing of this tree."""
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrialError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout
