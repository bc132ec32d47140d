"""A remedy is the user's own command with one thing changed."""

from __future__ import annotations

import shlex
from pathlib import Path

from kvoffload.doctor.given import Given


def test_a_command_keeps_what_was_given_but_what_it_changes() -> None:
    given = Given(Path("a b.toml"), ("server=/run/kvoffload", "memory=900TiB"))
    told = given.command("serve", memory="8GiB")
    assert told == "kvoffload serve --config 'a b.toml' --set server=/run/kvoffload --set memory=8GiB"
    assert shlex.split(told)[3] == "a b.toml"
    assert (
        given.command("doctor")
        == "kvoffload doctor --config 'a b.toml' --set server=/run/kvoffload --set memory=900TiB"
    )


def test_an_engine_with_a_private_server_has_settings_in_its_own_configuration() -> None:
    told = Given(None, ("memory=900TiB",), has_server=False).change("memory", "8GiB")
    assert told == '"memory": "8GiB" in vLLM\'s kv_connector_extra_config'
