"""A configuration file's domains, tenants, clients and operators, and one line for each mistake."""

from __future__ import annotations

import os
import pwd
import tomllib
from pathlib import Path

import pytest

from kvoffload.cache import NO_LIMIT, TENANT_LIMIT, TENANT_NAME_BYTES, LocalCache
from kvoffload.errors import ConfigError
from kvoffload.server import DomainSettings, Guest, TenantSettings
from kvoffload.server.config import ServerConfig, read_server_config
from kvoffload.units import GIB
from tests.kit.cache.cache_model import SMALL
from tests.kit.server.remote_client import make_keys

ME = pwd.getpwuid(os.getuid()).pw_name
KEY, OTHER_KEY = (make_keys().public.decode() for _ in range(2))
FULL = f"""
[[domains]]
name = "chat"
memory = "4GiB"
users = ["{ME}", 1001]
held_limit = "1GiB"

[[domains.tenants]]
name = "batch"
quota = "1GiB"
users = [1001]

[[domains.tenants]]
name = "live"

[[domains]]
name = "research"
memory = "1GiB"

[[clients]]
name = "dashboard"
key = "{KEY}"
domain = "chat"

[[clients]]
key = "{OTHER_KEY}"
domain = "research"
operator = true

[operators]
users = [0, 1002]
token_file = "token"
"""


def read(text: str) -> ServerConfig:
    return read_server_config(tomllib.loads(text), origin="file x.toml")


def test_everything_that_can_be_said() -> None:
    config = read(FULL)
    chat, research = config.make_domains()
    tenants = (
        TenantSettings(name="batch", quota_bytes=GIB, uids=frozenset({1001})),
        TenantSettings(name="live"),
    )
    users = frozenset({os.getuid(), 1001})
    assert chat == DomainSettings(name="chat", uids=users, tenants=tenants, held_limit_bytes=GIB)
    assert research == DomainSettings(name="research", held_limit_bytes=NO_LIMIT)
    assert [domain.memory for domain in config.domains] == [4 * GIB, GIB]
    assert config.make_guests() == {
        KEY: Guest(domain="chat", name="dashboard"),
        OTHER_KEY: Guest(domain="research", name="client", is_operator=True),
    }
    assert config.operators.users == (0, 1002)


def test_nothing_said_is_one_domain_for_all() -> None:
    config = read("")
    assert config == ServerConfig()
    assert config.make_domains() == (DomainSettings(name=""),)
    assert config.make_guests() == {}
    assert config.read_token(Path()) == ""


@pytest.mark.parametrize("domains", ["", '[[domains]]\nname = "chat"\nmemory = "1GiB"\n'])
def test_the_only_domain_needs_no_name_in_clients(domains: str) -> None:
    (guest,) = read(domains + f'[[clients]]\nkey = "{KEY}"\n').make_guests().values()
    assert guest.domain == ("chat" if domains else "")


SIZE = "a number of bytes or a size such as 512MiB, 64GiB or 1.5TiB"
USER = "the name of a user of this machine, or a number from 0 to 4294967294"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            'memory = "4GiB"',
            'memory = "4parsecs"',
            f"MB, GB, TB; allowed is {SIZE}, at least 64MiB",
        ),
        ('memory = "4GiB"', "", f"domains[0].memory is missing in file x.toml; allowed is {SIZE}, at least 64MiB"),
        (
            'memory = "4GiB"',
            "memory = 1",
            "domains[0].memory = 1 in file x.toml: input should be greater than or equal to 67108864; allowed is",
        ),
        ('memory = "4GiB"', 'memroy = "4GiB"', "domains[0].memory is missing in file x.toml"),
        (
            'held_limit = "1GiB"',
            'held = "1GiB"',
            "unknown name 'held' in domains[0] of file x.toml; did you mean 'held_",
        ),
        (
            'quota = "1GiB"',
            "quote = 1",
            "unknown name 'quote' in domains[0].tenants[0] of file x.toml; did you mean 'quota'?",
        ),
        (
            "[operators]",
            "[operator]",
            "unknown name 'operator' in the tables of file x.toml; did you mean 'operators'?",
        ),
        (
            "users = [1001]",
            'users = ["no such user"]',
            f"tenants[0].users[0] = 'no such user' in file x.toml: there is no such user here; allowed is {USER}",
        ),
        ("users = [1001]", "users = [-1]", f"users[0] = -1 in file x.toml: not a user; allowed is {USER}"),
        ("users = [1001]", "users = [true]", f"users[0] = True in file x.toml: not a user; allowed is {USER}"),
        ("users = [1001]", "users = [4294967295]", "users[0] = 4294967295 in file x.toml: not a user"),
        (
            "users = [1001]",
            "users = 1001",
            "domains[0].tenants[0].users = 1001 in file x.toml: input should be a valid",
        ),
        ("users = [1001]", "users = [77]", "tenants[0].users in file x.toml: user 77 is not of domain 'chat'; add it"),
        (
            'quota = "1GiB"',
            'quota = "5GiB"',
            "domains[0].tenants in file x.toml have quotas of 5GiB together; allowed is at most the domain's",
        ),
        (
            'name = "live"',
            'name = "batch"',
            "tenants[1].name = 'batch' in file x.toml is that of domains[0].tenants[0].name",
        ),
        (
            'name = "live"',
            f'name = "{"x" * 56}"',
            f"tenants[1].name = '{'x' * 56}' in file x.toml: not a name; allowed is a name of 1 to 55 bytes in",
        ),
        (
            'name = "live"',
            'name = "' + "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 28 + '"',
            "in file x.toml: not a name; allowed is a name of 1 to 55 bytes in one line",
        ),
        (
            'memory = "4GiB"',
            'memory = "131072TiB"',
            f"input should be less than or equal to {1 << 56}; allowed is {SIZE}",
        ),
        (
            'name = "research"',
            'name = "chat"',
            "domains[1].name = 'chat' in file x.toml is that of domains[0].name too",
        ),
        (
            'name = "research"',
            'name = ""',
            "domains[1].name = '' in file x.toml: not a name; allowed is a name of 1 to",
        ),
        ('name = "research"', 'name = "a\\nb"', "domains[1].name = 'a\\nb' in file x.toml: not a name"),
        (
            KEY,
            "abc",
            "clients[0].key = 'abc' in file x.toml: not a public key; allowed is a public key of 40 characters",
        ),
        (KEY, OTHER_KEY, "in file x.toml is that of clients[0].key too; choose another"),
        (
            'domain = "chat"',
            'domain = "chats"',
            "clients[0].domain = 'chats' in file x.toml: there is no such domain; did",
        ),
        ('domain = "chat"', "", "clients[0].domain is missing in file x.toml; known are chat, research"),
        (
            "operator = true",
            'operator = "yes"',
            "clients[1].operator = 'yes' in file x.toml: input should be a valid bool",
        ),
        (
            'token_file = "token"',
            "token_file = 5",
            "operators.token_file = 5 in file x.toml: input should be a valid str",
        ),
    ],
)
def test_what_is_wrong_is_one_line(old: str, new: str, line: str) -> None:
    assert FULL.count(old) >= 1
    with pytest.raises(ConfigError) as found:
        read(FULL.replace(old, new, 1))
    assert line in str(found.value)
    assert "\n" not in str(found.value)


def test_a_domain_has_as_many_tenants_as_a_pool_has() -> None:
    """One more, or a longer name, would be refused by the cache, when a server serves already."""
    table = "[[domains]]\nname = 'd'\nmemory = '1GiB'\n"
    names = ["x" * TENANT_NAME_BYTES, *(f"tenant {at}" for at in range(1, TENANT_LIMIT))]
    tenants = [f"[[domains.tenants]]\nname = {name!r}\nquota = 4096\n" for name in names]
    (domain,) = read(table + "".join(tenants)).make_domains()
    with LocalCache.create(SMALL) as cache:
        for tenant in domain.tenants:
            cache.open_tenant(tenant.name, quota_bytes=tenant.quota_bytes)
        with pytest.raises(RuntimeError, match="more are not served"):
            cache.open_tenant("one more")
    with pytest.raises(ConfigError, match="allowed is a list of at most 63 tables"):
        read(table + "".join(tenants) + "[[domains.tenants]]\nname = 'one more'\n")


@pytest.mark.parametrize("text", ["domains = 5", "domains = [5]", "operators = []", 'clients = "x"'])
def test_what_is_no_table_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"in file x\.toml: .*; allowed is a "):
        read(text)


def test_the_token_is_read_from_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    config, file = read(FULL), tmp_path / "token"
    file.touch(0o600)
    file.write_text("a long enough token\n")
    assert config.read_token(tmp_path) == "a long enough token"
    for wrong in ("short\n", "", "two lines of token\nand more", "x" * 129):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="holds no token; allowed is one line of 16 to 128 letters"):
            config.read_token(tmp_path)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="is for others too"):
        config.read_token(tmp_path)
