"""Coverage-guided fuzzing of the decoder: `python -m tests.unit.protocol.atheris_decoder [libFuzzer flags] CORPUS`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["kvoffload.protocol"]):
    from tests.unit.protocol.test_decoder_fuzz import decode_all


if __name__ == "__main__":
    atheris.Setup(sys.argv, decode_all)
    atheris.Fuzz()
