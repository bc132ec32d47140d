"""Checks the keys with which a server listens over TCP, and which library seals the links between servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvoffload.doctor.findings import Finding, fail, ok, warn
from kvoffload.doctor.machine import Machine
from kvoffload.errors import ConfigError
from kvoffload.key_files import read_pair_for
from kvoffload.peers.seal_library import SealLibrary, find_seal_library, time_seal_rate

NEWER = "use an image or a release of the system with OpenSSL 3.1 or newer, such as Debian 13"
_NEEDS = {"vaes", "vpclmulqdq", "avx512f"}
"""A newer libcrypto makes use of these."""


def check_keys(key_file: str, addresses: Mapping[str, str]) -> Iterator[Finding]:
    """`addresses`: where the server listens over TCP, by the setting that says so; empty where it does not."""
    for setting, address in addresses.items():
        if not address:
            continue
        try:
            read_pair_for(key_file, setting=setting, address=address)
        except ConfigError as fault:
            yield fail("keys", fault.message, fault.remedy)
        else:
            yield ok("keys", f"of {setting} = {address}: those in {key_file}")


def look_at_sealing(machine: Machine) -> Finding:
    """Seals for some milliseconds."""
    try:
        library = find_seal_library()
    except RuntimeError as fault:
        return fail("sealed links", str(fault), "install Debian's libssl3, or set peer_link = trusted")
    return check_sealing(library, time_seal_rate(), machine)


def check_sealing(library: SealLibrary, rate: float, machine: Machine) -> Finding:
    """`rate`: the bytes that a core seals in a second."""
    text = f"by {library.describe()}: {rate / 1e9:.1f} GB/s on a core"
    if not library.is_fast and set(machine.capabilities.cpu_features) >= _NEEDS:
        return warn("sealed links", f"{text}, without this processor's VAES, which came with 3.1", NEWER)
    return ok("sealed links", text)
