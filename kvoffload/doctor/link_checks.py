"""Says what seals the links between servers, and how fast."""

from __future__ import annotations

from kvoffload.doctor.findings import Finding, fail, ok, warn
from kvoffload.doctor.machine import Machine
from kvoffload.peers.seal_library import PACKAGE, SealLibrary, find_seal_library, time_seal_rate

_INSTALL = "pip install 'kvoffload[seal]'"
_NEEDS = {"vaes", "vpclmulqdq", "avx512f"}
"""A newer libcrypto makes use of these."""


def look_at_sealing(machine: Machine) -> Finding:
    """Seals for some milliseconds."""
    try:
        library = find_seal_library()
    except RuntimeError as fault:
        return fail("sealed links", str(fault), _INSTALL)
    return check_sealing(library, time_seal_rate(), machine)


def check_sealing(library: SealLibrary, rate: float, machine: Machine) -> Finding:
    """`rate`: the bytes that a core seals in a second."""
    text = f"by {library.describe()}: {rate / 1e9:.1f} GB/s on a core"
    if library.refusal:
        return warn("sealed links", f"{text}; {PACKAGE} has another one: {library.refusal}", f"{_INSTALL} -U")
    if not library.is_fast and set(machine.capabilities.cpu_features) >= _NEEDS:
        return warn("sealed links", f"{text}, without this processor's VAES, which came with 3.1", _INSTALL)
    return ok("sealed links", text)
