"""The options that a user gave to `kvoffload doctor`, so that remedies keep them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from kvoffload.config.secrets import mask_secrets


@dataclass(frozen=True)
class Given:
    """The words of the command line, and whether all sources together name a server."""

    file: Path | None = None
    assignments: tuple[str, ...] = ()
    has_server: bool = True

    def command(self, name: str, **changed: str) -> str:
        """A command of ours with everything that was given but secrets, and with these settings instead of theirs."""
        kept = [one for one in self.assignments if one.partition("=")[0].strip() not in changed]
        words = ["kvoffload", name, *(() if self.file is None else ("--config", str(self.file)))]
        for assignment in (*kept, *(f"{setting}={value}" for setting, value in changed.items())):
            words += ["--set", mask_secrets(assignment)]
        return shlex.join(words)

    def change(self, setting: str, value: str) -> str:
        """How the setting is changed where it is used: by a server's command line, or in the configuration of an engine
        that has a private one."""
        if self.has_server:
            return self.command("serve", **{setting: value})
        return f'"{setting}": "{value}" in vLLM\'s kv_connector_extra_config'


NOTHING = Given()
