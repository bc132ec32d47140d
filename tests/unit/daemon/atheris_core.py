"""Coverage-guided fuzzing of the server's core: `python -m tests.unit.daemon.atheris_core [libFuzzer flags] CORPUS`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["kvoffload.protocol", "kvoffload.daemon"]):
    from tests.unit.daemon.core_bytes import serve_all


if __name__ == "__main__":
    atheris.Setup(sys.argv, serve_all)
    atheris.Fuzz()
