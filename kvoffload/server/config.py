"""Domains, tenants, clients and operators of a server, from the tables of its configuration file.

[[domains]]                      [[clients]]
name = "chat"                    name = "dashboard"
memory = "64GiB"                 key = "<public key>"
users = ["alice", 1001]          domain = "chat"
                                 operator = true
[[domains.tenants]]
name = "batch"                   [operators]
quota = "16GiB"                  users = ["root"]
users = ["alice"]                token_file = "token"

                                 [[peers]]
                                 address = "tcp://10.0.0.2:5555"
                                 key = "<public key>"
"""

from __future__ import annotations

import difflib
import pwd
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
)

from kvoffload.cache import NO_LIMIT, TENANT_LIMIT, TENANT_NAME_BYTES
from kvoffload.config.secrets import mask_secrets
from kvoffload.config.tcp_address import TCP_FORM, parse_tcp_address
from kvoffload.errors import ConfigError
from kvoffload.key_files import KEY_FORM, is_public_key, read_private_text
from kvoffload.peers.fleet_member import MAX_MEMBERS
from kvoffload.protocol.limits import NAME_BYTES
from kvoffload.server.sessions.domain import DomainSettings, TenantSettings
from kvoffload.server.sessions.session import Guest
from kvoffload.units import MIB, SIZE_FORM, format_size, parse_size

MAX_DOMAINS = 64
MAX_MEMORY_BYTES = 1 << 56
"""More than any machine has."""
MAX_PEERS = MAX_MEMBERS
MIN_TOKEN_LETTERS = 16
_NAME_FORM = f"a name of 1 to {NAME_BYTES} bytes in one line"
_TENANT_NAME_FORM = f"a name of 1 to {TENANT_NAME_BYTES} bytes in one line"
_USER_FORM = "the name of a user of this machine, or a number from 0 to 4294967294"
_LIST_FORM = "a list"


def _name(value: str) -> str:
    if not value or not value.isprintable() or len(value.encode()) > NAME_BYTES:
        raise ValueError("not a name")
    return value


def _tenant_name(value: str) -> str:
    if len(value.encode()) > TENANT_NAME_BYTES:
        raise ValueError("not a name")
    return value


def _size(value: Any) -> int:
    if not isinstance(value, str | int):
        raise ValueError("not a size")
    return parse_size(value)


def _user(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32 - 1:
        return value
    if not isinstance(value, str):
        raise ValueError("not a user")
    try:
        return pwd.getpwnam(value).pw_uid
    except (KeyError, ValueError):
        raise ValueError("there is no such user here") from None


def _key(value: str) -> str:
    if not is_public_key(value):
        raise ValueError("not a public key")
    return value


def _address(value: str) -> str:
    return str(parse_tcp_address(value))


def _field(allowed: str, default: Any = ..., **bounds: Any) -> Any:
    return Field(default=default, json_schema_extra={"allowed": allowed}, **bounds)


_Name = Annotated[StrictStr, AfterValidator(_name)]
_Users = tuple[Annotated[int, BeforeValidator(_user)], ...] | None
_Size = Annotated[int, BeforeValidator(_size)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Tenant(_Table):
    name: Annotated[_Name, AfterValidator(_tenant_name)] = _field(_TENANT_NAME_FORM)
    quota: _Size = _field(SIZE_FORM, 0)
    users: _Users = _field(_USER_FORM, None)


class _Domain(_Table):
    name: _Name = _field(_NAME_FORM)
    memory: _Size = _field(f"{SIZE_FORM}, at least 64MiB", ge=64 * MIB, le=MAX_MEMORY_BYTES)
    users: _Users = _field(_USER_FORM, None)
    held_limit: _Size = _field(SIZE_FORM, NO_LIMIT, ge=1, le=NO_LIMIT)
    tenants: tuple[_Tenant, ...] = _field(f"{_LIST_FORM} of at most {TENANT_LIMIT} tables", (), max_length=TENANT_LIMIT)


class _Client(_Table):
    key: Annotated[StrictStr, AfterValidator(_key)] = _field(KEY_FORM)
    name: _Name = _field(_NAME_FORM, "client")
    domain: StrictStr = _field("the name of a domain", "")
    """Name of the client's domain; empty if there is only one."""
    operator: StrictBool = _field("true or false", False)


class _Peer(_Table):
    address: Annotated[StrictStr, AfterValidator(_address)] = _field(TCP_FORM)
    """Address of the peer's control channel: its `listen`."""
    key: Annotated[StrictStr, AfterValidator(_key)] = _field(KEY_FORM)
    """The peer's public key."""


class _Operators(_Table):
    users: _Users = _field(_USER_FORM, None)
    token_file: StrictStr = _field("the path of a file that only this user can read", "")


class ServerConfig(_Table):
    """The tables of the configuration file. Frozen; made by `read_server_config`."""

    domains: tuple[_Domain, ...] = _field(f"{_LIST_FORM} of at most {MAX_DOMAINS} tables", (), max_length=MAX_DOMAINS)
    clients: tuple[_Client, ...] = _field(f"{_LIST_FORM} of at most 4096 tables", (), max_length=4096)
    peers: tuple[_Peer, ...] = _field(f"{_LIST_FORM} of at most {MAX_PEERS} tables", (), max_length=MAX_PEERS)
    operators: _Operators = _field("a table", _Operators())

    def make_domains(self) -> tuple[DomainSettings, ...]:
        """Returns the domains in the order of the file; without any, one for all who can open the socket."""
        return tuple(_make_domain(domain) for domain in self.domains) or (DomainSettings(name=""),)

    def make_guests(self) -> dict[str, Guest]:
        """Returns the clients and peers that may connect over TCP, by public key."""
        first = self.make_domains()[0].name
        peers = {peer.key: Guest(domain=first, name=peer.address, is_peer=True) for peer in self.peers}
        clients = {
            client.key: Guest(domain=client.domain or first, name=client.name, is_operator=client.operator)
            for client in self.clients
        }
        return peers | clients

    def read_token(self, folder: Path) -> str:
        """Reads the operators' token; empty: there is none. `folder` is that of the configuration file."""
        if not self.operators.token_file:
            return ""
        file = folder / self.operators.token_file
        token = read_private_text(file).strip()
        if not (MIN_TOKEN_LETTERS <= len(token) <= NAME_BYTES and token.isascii() and token.isprintable()):
            raise ConfigError(
                f"token file {file} holds no token",
                remedy=f"allowed is one line of {MIN_TOKEN_LETTERS} to {NAME_BYTES} letters and digits",
            )
        return token


def read_server_config(tables: Mapping[str, object], *, origin: str) -> ServerConfig:
    """Reads the tables of a configuration file that are no settings.

    Raises ConfigError with one line that names the place, the value, the file and what is allowed.
    """
    try:
        config = ServerConfig.model_validate(dict(tables))
    except ValidationError as fault:
        raise _describe(fault, origin) from None  # the fault has values with secrets in it
    _check_domains(config, origin)
    _check_clients(config, origin)
    return config


def _make_domain(domain: _Domain) -> DomainSettings:
    return DomainSettings(
        name=domain.name,
        uids=None if domain.users is None else frozenset(domain.users),
        tenants=tuple(
            TenantSettings(
                name=tenant.name,
                quota_bytes=tenant.quota,
                uids=None if tenant.users is None else frozenset(tenant.users),
            )
            for tenant in domain.tenants
        ),
        held_limit_bytes=domain.held_limit,
    )


def _check_domains(config: ServerConfig, origin: str) -> None:
    _check_once(((f"domains[{at}].name", domain.name) for at, domain in enumerate(config.domains)), origin)
    for at, domain in enumerate(config.domains):
        place = f"domains[{at}].tenants"
        _check_once(((f"{place}[{number}].name", tenant.name) for number, tenant in enumerate(domain.tenants)), origin)
        promised = sum(tenant.quota for tenant in domain.tenants)
        if promised > domain.memory:
            raise ConfigError(
                f"{place} in {origin} have quotas of {format_size(promised)} together",
                remedy=f"allowed is at most the domain's memory, {format_size(domain.memory)}",
            )
        if domain.users is None:
            continue
        for number, tenant in enumerate(domain.tenants):
            for user in set(tenant.users or ()) - set(domain.users):
                raise ConfigError(
                    f"{place}[{number}].users in {origin}: user {user} is not of domain {domain.name!r}",
                    remedy="add it to the domain's users, or leave it out",
                )


def _check_clients(config: ServerConfig, origin: str) -> None:
    keys = [(f"clients[{at}].key", client.key) for at, client in enumerate(config.clients)]
    keys += [(f"peers[{at}].key", peer.key) for at, peer in enumerate(config.peers)]
    _check_once(keys, origin)
    _check_once(((f"peers[{at}].address", peer.address) for at, peer in enumerate(config.peers)), origin)
    known = [domain.name for domain in config.make_domains()]
    for at, client in enumerate(config.clients):
        if not client.domain and len(known) > 1:
            line = f"clients[{at}].domain is missing in {origin}"
            raise ConfigError(line, remedy=f"known are {', '.join(known)}")
        if client.domain not in ("", *known):
            message = f"clients[{at}].domain = {client.domain!r} in {origin}: there is no such domain"
            raise ConfigError(message, remedy=_hint(client.domain, known))


def _check_once(named: Iterable[tuple[str, str]], origin: str) -> None:
    seen: dict[str, str] = {}
    for place, name in named:
        if name in seen:
            raise ConfigError(f"{place} = {name!r} in {origin} is that of {seen[name]} too", remedy="choose another")
        seen[name] = place


def _describe(fault: ValidationError, origin: str) -> ConfigError:
    """Describes the first fault: where, what, and what is allowed there."""
    found = fault.errors(include_url=False)[0]
    table: type[BaseModel] = ServerConfig
    place, allowed = "", "a table"
    for part in found["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
            continue
        if found["type"] == "extra_forbidden" and part not in table.model_fields:
            line = f"unknown name {mask_secrets(part)!r} in {place or 'the tables'} of {origin}"
            return ConfigError(line, remedy=_hint(str(part), list(table.model_fields)))
        if part not in table.model_fields:
            continue
        place += f".{part}" if place else str(part)
        extra = table.model_fields[str(part)].json_schema_extra
        assert isinstance(extra, dict)
        allowed = str(extra["allowed"])
        table = _TABLES.get(str(part), table)
    if found["type"] == "missing":
        return ConfigError(f"{place} is missing in {origin}", remedy=f"allowed is {allowed}")
    written = repr(found["input"])
    shown = mask_secrets(written)
    # A reason with quotation marks may quote a part of the secret.
    reason = "not allowed here" if shown != written and re.search(r"['\"]", found["msg"]) else found["msg"]
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    reason = reason.removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    return ConfigError(f"{place} = {shown} in {origin}: {reason}", remedy=f"allowed is {allowed}")


_TABLES: dict[str, type[BaseModel]] = {
    "domains": _Domain,
    "tenants": _Tenant,
    "clients": _Client,
    "peers": _Peer,
    "operators": _Operators,
}


def _hint(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}"
