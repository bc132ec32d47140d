"""Whether an engine finds us, and is one that we know."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.doctor.findings import Finding, fail, ok, warn
from kvoffload.doctor.machine import ENGINES, PLUGIN_GROUP, Machine

PLUGIN = "kvoffload"
EXPANDABLE = "expandable_segments:True"
OLDEST_VLLM, NEWEST_VLLM = (0, 31), (0, 33)
"""The range of vLLM versions that the connector was tried with."""


def check_engine(machine: Machine, allowed_plugins: str | None, allocator: str = "") -> Iterator[Finding]:
    """Checks what an engine finds here; `allowed_plugins`: what VLLM_PLUGINS says; None: it is not set, and all are
    loaded. `allocator`: what PYTORCH_CUDA_ALLOC_CONF says."""
    yield check_version(machine)
    yield check_plugin(machine, allowed_plugins)
    if machine.engines:
        yield check_allocator(allocator)


def check_version(machine: Machine) -> Finding:
    found = next((name for name in ENGINES if name in machine.engines), "")
    if not found:
        return ok("vLLM", "not installed here: this machine serves, or has other engines")
    version = machine.engines[found]
    numbers = tuple(int(word) if word.isdigit() else 0 for word in version.split(".")[:2])
    oldest, newest = ("{}.{}".format(*numbers) for numbers in (OLDEST_VLLM, NEWEST_VLLM))
    if numbers < OLDEST_VLLM:
        return fail(
            "vLLM",
            f"{version}, older than {oldest}, whose connector interface differs",
            f"pip install '{found}>={oldest}'",
        )
    if numbers > NEWEST_VLLM:
        return warn(
            "vLLM", f"{version}, newer than {newest}: not tried yet", f"pip install '{found}<0.{NEWEST_VLLM[1] + 1}'"
        )
    return ok("vLLM", f"{version} ({found})")


def check_plugin(machine: Machine, allowed_plugins: str | None) -> Finding:
    if PLUGIN not in machine.plugins:
        return fail(
            "vLLM plugin",
            f"an engine of this Python finds no entry point {PLUGIN} in {PLUGIN_GROUP}",
            "pip install --force-reinstall --no-deps kvoffload",
        )
    if allowed_plugins is not None and PLUGIN not in allowed_plugins.split(","):
        wanted = ",".join(filter(None, [*allowed_plugins.split(","), PLUGIN]))
        return fail(
            "vLLM plugin", f"VLLM_PLUGINS is {allowed_plugins!r}, without {PLUGIN}", f"export VLLM_PLUGINS={wanted}"
        )
    return ok("vLLM plugin", f"{PLUGIN} in {PLUGIN_GROUP}")


def check_allocator(allocator: str) -> Finding:
    """vLLM looks for this text, and starts with no connector at all where it finds it."""
    if EXPANDABLE in allocator:
        others = ",".join(word for word in allocator.split(",") if word.strip() != EXPANDABLE)
        change = f"export PYTORCH_CUDA_ALLOC_CONF={others}" if others else "unset PYTORCH_CUDA_ALLOC_CONF"
        return warn(
            "CUDA allocator",
            f"PYTORCH_CUDA_ALLOC_CONF has {EXPANDABLE}, with which vLLM refuses every KV connector unless its cumem "
            "allocator is on",
            f"vllm serve --enable-cumem-allocator ...; or {change}",
        )
    return ok("CUDA allocator", "no setting that vLLM refuses together with a connector")
