"""Whether a command that starts SGLang asks for kvoffload in the right way, and for nothing that it refuses."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvoffload.config.sources import load_settings
from kvoffload.doctor.findings import Finding, fail, ok, warn
from kvoffload.doctor.machine import SGLANG, Machine
from kvoffload.errors import ConfigError

CHECK = "SGLang launch"
TESTED_SGLANG = "0.5.23"
"""The version of SGLang that kvoffload was tested with, and the only one that it joins."""
PAGE_SIZE = "--page-size"
DEVICE = "--device"
REFUSED: Mapping[str, tuple[str, ...]] = {
    "--pp-size": ("1",),
    "--pipeline-parallel-size": ("1",),
    "--dp-size": ("1",),
    "--data-parallel-size": ("1",),
    "--attn-dp-size": ("1",),
    "--enable-dp-attention": (),
    "--attn-cp-size": ("1",),
    "--dcp-size": ("1",),
    "--nnodes": ("1",),
    "--speculative-algorithm": (),
    "--enable-multimodal": (),
    "--disaggregation-mode": ("null",),
    "--enable-memory-saver": (),
    "--enable-linker-mla-dedup": (),
}
"""Options that kvoffload does not serve in SGLang, and the values with which it does."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """One of the two ways in which SGLang takes kvoffload: its options, and the keys of its configuration."""

    switch: str
    backend: str
    config: str
    wanted: Mapping[str, object]
    settings_key: str


LINKER = Door(
    switch="--enable-unified-cache-external-linker",
    backend="--unified-cache-external-linker-backend",
    config="--unified-cache-external-linker-config",
    wanted={"linker": "KVOffloadLinker", "linker_module_path": "kvoffload.sglang.plugin"},
    settings_key="linker_extra_config",
)
STORAGE = Door(
    switch="--enable-hierarchical-cache",
    backend="--hicache-storage-backend",
    config="--hicache-storage-backend-extra-config",
    wanted={
        "module_path": "kvoffload.sglang.hicache_storage",
        "class_name": "KVOffloadStorage",
        "interface_v1": 1,
    },
    settings_key="settings",
)


def check_launch(line: str, machine: Machine) -> Iterator[Finding]:
    """Checks the command `line`, as it would be typed into a shell on this machine."""
    try:
        options = read_options(line)
    except ValueError as fault:
        yield fail(CHECK, f"the command cannot be read: {fault}", 'write it to a file, and give --sglang "$(cat FILE)"')
        return
    findings = [_check_version(machine), *_check_doors(options), *_check_refused(options, machine)]
    found = [one for one in findings if one is not None]
    yield from found or [ok(CHECK, f"asks for kvoffload, with pages of {options[PAGE_SIZE]} tokens")]


def read_options(line: str) -> dict[str, str]:
    """Returns the options with their first values; an option without a value has an empty one. ValueError: the quotes
    of the line do not match."""
    options: dict[str, str] = {}
    name = ""
    for word in shlex.split(line.replace("\\\n", " ")):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value
        elif name:
            options[name], name = options[name] or word, ""
    return options


def _check_version(machine: Machine) -> Finding | None:
    version = machine.engines.get(SGLANG)
    remedy = f"pip install sglang=={TESTED_SGLANG}"
    if version is None:
        return warn(CHECK, "SGLang is not installed in this Python, so that its version was not checked", remedy)
    if version != TESTED_SGLANG:
        return fail(CHECK, f"SGLang is {version}, and kvoffload was tested with {TESTED_SGLANG}", remedy)
    return None


def _check_doors(options: Mapping[str, str]) -> Iterator[Finding]:
    door = next((one for one in (LINKER, STORAGE) if one.switch in options), None)
    if door is None:
        yield fail(
            CHECK,
            "it asks for no cache outside of SGLang",
            f"add {LINKER.switch} {LINKER.backend} dynamic {LINKER.config} '{json.dumps(LINKER.wanted)}'",
        )
        return
    if options.get(door.backend) != "dynamic":
        yield fail(CHECK, f"{door.backend} is {options.get(door.backend) or 'missing'}", f"add {door.backend} dynamic")
    try:
        config = json.loads(options.get(door.config, "{}"))
    except ValueError as fault:
        yield fail(CHECK, f"{door.config} is not JSON: {fault}", "put it in single quotes")
        return
    if not isinstance(config, dict):
        yield fail(CHECK, f"{door.config} is not an object", f"begin with {json.dumps(door.wanted)}")
        return
    wrong = {name: value for name, value in door.wanted.items() if config.get(name) != value}
    if wrong:
        yield fail(CHECK, f"{door.config} lacks {', '.join(wrong)}", f"add {json.dumps(wrong)[1:-1]}")
    settings = config.get(door.settings_key, {})
    try:
        load_settings(engine=settings)
    except ConfigError as fault:
        yield fail(CHECK, f"{door.settings_key}: {fault.message}", fault.remedy or "kvoffload config show")


def _check_refused(options: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    device = options.get(DEVICE) or ("cuda" if machine.nvidia_devices else "cpu")
    if device != "cpu":
        yield fail(CHECK, f"the engine runs on {device}, which kvoffload does not serve in SGLang yet", f"{DEVICE} cpu")
    for name, served in REFUSED.items():
        if name in options and options[name] not in served:
            text = f"{name} {options[name]}".rstrip()
            yield fail(CHECK, f"kvoffload does not serve {text} in SGLang yet", f"leave {name} out")
    if options.get(PAGE_SIZE, "1") in ("", "1"):
        yield warn(
            CHECK,
            "pages have one token, so that each token is a record of its own",
            f"{PAGE_SIZE} 16, unless the model has recurrent layers",
        )
