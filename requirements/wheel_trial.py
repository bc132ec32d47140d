"""Tries a wheel as its user has it: `python -m requirements.wheel_trial WHEEL`, with the Python that is to run it.

An environment of nothing but the wheel and what pip brings for it runs `kvoffload --help` and `kvoffload doctor`, then
examples/02_shared_server.py: a server that is served, a save and a load, with numpy alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples/02_shared_server.py"
WHERE = "import kvoffload, sys; print(kvoffload.__file__.startswith(sys.prefix))"
KERNELS = "from kvoffload import native; print(','.join(native.capabilities().kernel_archs) or 'none')"


class TrialError(Exception):
    """Something does not do what it does in a good wheel."""


class Environment:
    """A folder with an environment of its own; nothing else that is installed here is seen in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)

    def run(self, command: str, *words: object, wanted: tuple[int, ...] = (0,)) -> str:
        """Returns the output. TrialError if the command ends with another code than one of `wanted`."""
        return self._run([str(self._folder / "bin" / command), *map(str, words)], self._folder, wanted)

    def run_script(self, script: str, folder: Path) -> str:
        """Runs shell commands in a folder, with the environment activated, and returns their output. TrialError."""
        return self._run(["bash", "-euo", "pipefail", "-c", script], folder, (0,))

    def _run(self, line: list[str], folder: Path, wanted: tuple[int, ...]) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = os.pathsep.join([str(self._folder / "bin"), environment["PATH"]])
        done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in wanted:
            raise TrialError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


def try_wheel(wheel: Path, folder: Path) -> str:
    """Installs a wheel into an environment of its own, and describes in a line what it can do. TrialError."""
    environment = Environment(folder)
    environment.run("python", "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel)
    return try_installed(environment)


def try_installed(environment: Environment) -> str:
    """Tries the kvoffload that an environment has, and describes in a line what it can do. TrialError."""
    if environment.run("python", "-c", WHERE).strip() != "True":
        raise TrialError("another kvoffload is seen than that of the wheel")
    if "serve" not in environment.run("kvoffload", "--help"):
        raise TrialError("`kvoffload --help` does not name `serve`")
    # 1: it found something in the way on this machine, and said so.
    environment.run("kvoffload", "doctor", wanted=(0, 1))
    restored = environment.run("python", EXAMPLE).splitlines()[-1]
    return f"  runs; kernels: {environment.run('python', '-c', KERNELS).strip()}; {restored}"


def main(wheel: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(try_wheel(wheel.absolute(), Path(folder) / "environment"))
        except TrialError as fault:
            print(f"error: {fault}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
