"""Every setting: its type, default, bounds and meaning. `config` says where a value came from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from kvoffload.config.mooncake_address import MOONCAKE_FORM
from kvoffload.config.s3_address import ENDPOINT_FORM, S3_FORM
from kvoffload.config.tcp_address import TCP_FORM
from kvoffload.config.types import (
    ClassPath,
    Count,
    Duration,
    EventsInterval,
    FilePath,
    Folders,
    KeyFilePath,
    MooncakeUrl,
    PlaceText,
    Price,
    S3Endpoint,
    S3Url,
    SecretFilePath,
    Size,
    SizeOrAuto,
    SocketPath,
    Switch,
    TcpEndpoint,
    ValkeyUrl,
)
from kvoffload.config.valkey_address import VALKEY_FORM
from kvoffload.units import GIB, MIB, SIZE_FORM

_SERVED_ROOMS = ("cache", "server", "tiers")


def _setting(
    default: Any,
    *,
    room: str,
    allowed: str,
    description: str,
    is_served: bool | None = None,
    is_for_tests: bool = False,
    **bounds: Any,
) -> Any:
    """`is_served`: an engine's private server has it, too. None: as the room that reads it says."""
    extra: JsonDict = {
        "room": room,
        "allowed": allowed,
        "is_served": room in _SERVED_ROOMS if is_served is None else is_served,
        "is_for_tests": is_for_tests,
    }
    return Field(default=default, description=description, json_schema_extra=extra, **bounds)


class Settings(BaseModel):
    """All settings of one process. Frozen; made by `kvoffload.config.sources.load_settings`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory: SizeOrAuto = _setting(
        "auto",
        room="cli",
        is_served=True,
        allowed=f"auto, or {SIZE_FORM}, at least 64MiB",
        description="Host memory for cached blocks, all ranks together. auto is half of the free memory, at least "
        "1GiB, and at most four times the memory that the engines that start a private server use for caching "
        "themselves.",
    )
    memory_floor: Count = _setting(
        25,
        room="cli",
        is_served=True,
        allowed="a number from 0 to 100",
        description="Per cent of the memory that the server keeps when the machine's or its cgroup's memory gets "
        "short. It gives whole segments beyond that back, and takes them again later. 100: it gives nothing back.",
        ge=0,
        le=100,
    )
    sparse_memory: Switch = _setting(
        False,
        room="cli",
        is_served=True,
        allowed="true or false",
        description="The kernel gives memory at the first touch, and whether there is enough is not checked: for a "
        "pool larger than the machine, of which little is touched.",
        is_for_tests=True,
    )
    server: SocketPath = _setting(
        "",
        room="client",
        allowed="the path of a Unix socket of at most 107 bytes, auto, or empty for a private server",
        description="Socket of a shared cache server. auto is /run/kvoffload.sock for root and "
        "$XDG_RUNTIME_DIR/kvoffload.sock for others; commands use it if the setting is empty. With an empty setting an "
        "engine starts a private server that ends with it.",
    )
    listen: TcpEndpoint = _setting(
        "",
        room="cli",
        allowed=f"{TCP_FORM}, or empty",
        description="Address at which `kvoffload serve` takes TCP connections, for observers. Needs key_file, on "
        "loopback too. Empty: none.",
    )
    key_file: KeyFilePath = _setting(
        "",
        room="cli",
        allowed="the path of a secret key file of `kvoffload keys new`, or empty",
        description="Secret key of `kvoffload serve` for TCP connections. [[clients]] in the configuration file lists "
        "the clients.",
    )
    peer_listen: TcpEndpoint = _setting(
        "",
        room="cli",
        allowed=f"{TCP_FORM}, or empty",
        description="Address at which `kvoffload serve` takes links of its fleet's other servers, over which records "
        "travel. [[peers]] in the configuration file lists these servers; they connect to `listen` first. Needs "
        "key_file, on loopback too. Empty: it serves no other servers.",
    )
    peer_link: Literal["sealed", "trusted"] = _setting(
        "sealed",
        room="cli",
        allowed="sealed or trusted",
        description="Whether records are encrypted between the servers of a fleet. trusted is for networks that no "
        "other machine can listen to or write to. All servers need the same value.",
    )
    peer_compress: Literal["auto", "on", "off"] = _setting(
        "auto",
        room="cli",
        allowed="auto, on or off, in quotes",
        description="Whether records travel between the servers of a fleet in a lossless code. auto decides like "
        "remote_compress, by the measured speed of each peer. A server with `off` sends and gets no coded records.",
    )
    fleet_registry: ValkeyUrl = _setting(
        "",
        room="cli",
        allowed=f"{VALKEY_FORM}, or empty",
        description="A Valkey or Redis server where the servers of a fleet announce themselves, in addition to those "
        "that [[peers]] lists. Connections use the valkey_ files. Needs key_file and fleet_secret_file. Empty: none.",
    )
    fleet_name: str = _setting(
        "fleet",
        room="cli",
        allowed="1 to 64 letters, digits, dots and dashes",
        description="Name of the fleet. Servers with the same name find each other at fleet_registry.",
        pattern=r"^[A-Za-z0-9.-]{1,64}$",
    )
    fleet_secret_file: SecretFilePath = _setting(
        "",
        room="cli",
        allowed="the absolute path of a file that only this user can read, or empty",
        description="A secret that all servers of the fleet share: a server that has it may join. At least 16 letters.",
    )
    http: TcpEndpoint = _setting(
        "tcp://127.0.0.1:9470",
        room="cli",
        allowed=TCP_FORM,
        description="Address of `kvoffload web`: metrics, health, counts. Everyone who can reach it may read them.",
    )
    http_token_file: SecretFilePath = _setting(
        "",
        room="cli",
        allowed="the absolute path of a file that only this user can read, or empty",
        description="The token that requests for actions need at `kvoffload web`. Empty: it takes no actions.",
    )
    computing_price: Price = _setting(
        0.0,
        room="web",
        allowed="a number from 0 to 1000000000",
        description="Price of an hour of prefill on an engine, in your currency. `/ledger` then says what hits saved, "
        "and the page, `/stats` and `kvoffload top` what more memory would have. 0: they do not.",
    )
    memory_price: Price = _setting(
        0.0,
        room="web",
        allowed="a number from 0 to 1000000000",
        description="Price of a GiB of the server's memory for an hour, for what `/ledger` says that blocks cost, and "
        "for what more memory would have.",
    )
    tier_price: Price = _setting(
        0.0,
        room="web",
        allowed="a number from 0 to 1000000000",
        description="Price of a GiB that slower tiers read or write, for what `/ledger` says that blocks cost.",
    )
    linger: Duration = _setting(
        0.0,
        room="client",
        is_served=True,
        allowed="a duration from 0s to 24h",
        description="How long a private server stays after its last engine has ended. An engine that starts within "
        "that time finds its cache again.",
        ge=0.0,
        le=86400.0,
    )
    socket_mode: Literal["0600", "0660", "0666"] = _setting(
        "0600",
        room="cli",
        allowed="0600, 0660 or 0666, in quotes",
        description="Users that may open the sockets of `kvoffload serve`: its own, its group too, or everyone.",
    )
    socket_group: str = _setting(
        "",
        room="cli",
        allowed="the name or number of a group, or empty for the server's own",
        description="Group of the sockets of `kvoffload serve`.",
        max_length=32,
    )
    segment_size: Size = _setting(
        GIB,
        room="cache",
        allowed="a size from 64MiB to 64GiB",
        description="Size of one shared memory segment; memory is taken and handed over in whole segments.",
        ge=64 * MIB,
        le=64 * GIB,
    )
    disk: Folders = _setting(
        "",
        room="tiers",
        allowed="absolute paths of folders of this user alone (mode 0700), with commas between them, or empty",
        description="Folders of a slower tier for blocks that memory loses, one on each device. Empty: none.",
    )
    disk_size: Size = _setting(
        0,
        room="tiers",
        allowed=f"{SIZE_FORM}; at least 1GiB where disk is set",
        description="Most bytes that the files of each folder may take together.",
    )
    disk_write: Literal["write_through", "write_back", "second_use"] = _setting(
        "write_through",
        room="server",
        allowed="write_through, write_back or second_use",
        description="When blocks are written to disk: as soon as they are stored, when memory will need their room, or "
        "then and only if they were loaded since.",
    )
    disk_queue: Duration = _setting(
        2.0,
        room="server",
        allowed="a duration from 10ms to 60s",
        description="How far writes may be behind, by the disk's measured speed. Blocks beyond that are not written.",
        ge=0.01,
        le=60.0,
    )
    disk_daily: Size = _setting(
        0,
        room="tiers",
        allowed=f"{SIZE_FORM}; 0 for any",
        description="Most bytes that may be written to each folder in a day.",
    )
    disk_compress: Literal["auto", "on", "off"] = _setting(
        "off",
        room="tiers",
        allowed="auto, on or off, in quotes",
        description="Whether records are written to disk in a lossless code: always if it makes them shorter, only "
        "while the disk is so slow that coded records are read sooner (`auto`), or never.",
    )
    valkey: ValkeyUrl = _setting(
        "",
        room="tiers",
        allowed=f"{VALKEY_FORM}, or empty",
        description="A Valkey or Redis server, or a node of a cluster: a tier behind memory and disk, for blocks that "
        "other machines use too. Empty: none.",
    )
    valkey_password_file: SecretFilePath = _setting(
        "",
        room="tiers",
        allowed="the absolute path of a file that only this user can read, or empty",
        description="A file with the password of the user in `valkey`.",
    )
    valkey_ca_file: FilePath = _setting(
        "",
        room="tiers",
        allowed="an absolute path, or empty",
        description="A file of certificate authorities that are trusted with valkeys://. Empty: those that this "
        "machine trusts.",
    )
    valkey_cert_file: FilePath = _setting(
        "",
        room="tiers",
        allowed="an absolute path, or empty",
        description="A file with the client certificate for valkeys://, if the server asks for one.",
    )
    valkey_key_file: SecretFilePath = _setting(
        "",
        room="tiers",
        allowed="the absolute path of a file that only this user can read, or empty",
        description="A file with the key of the certificate in valkey_cert_file.",
    )
    valkey_ttl: Duration = _setting(
        0.0,
        room="tiers",
        allowed="a duration from 1s to 8760h; 0s for ever",
        description="How long a record stays in Valkey without being used. 0s: until the Valkey server evicts it.",
        ge=0.0,
        le=8760 * 3600.0,
    )
    s3: S3Url = _setting(
        "",
        room="tiers",
        allowed=f"{S3_FORM}, or empty",
        description="A bucket of an S3-compatible object store: the last of all tiers, for blocks that other machines "
        "use too. Empty: none.",
    )
    s3_endpoint: S3Endpoint = _setting(
        "",
        room="tiers",
        allowed=f"{ENDPOINT_FORM}; or empty",
        description="Address of the object store. Empty: Amazon's, in the region.",
    )
    s3_region: str = _setting(
        "",
        room="tiers",
        allowed="the name of a region, or empty",
        description="Region of the bucket. Empty: the environment's, or us-east-1.",
        max_length=64,
        pattern="^[a-z0-9-]*$",
    )
    s3_credentials_file: SecretFilePath = _setting(
        "",
        room="tiers",
        allowed="the absolute path of a file that only this user can read, or empty",
        description="A file with aws_access_key_id and aws_secret_access_key in its section [default]. Empty: those of "
        "the environment or of the machine's role.",
    )
    s3_ca_file: FilePath = _setting(
        "",
        room="tiers",
        allowed="an absolute path, or empty",
        description="A file of certificate authorities that are trusted with https://, in addition to the public ones.",
    )
    mooncake: MooncakeUrl = _setting(
        "",
        room="tiers",
        allowed=f"{MOONCAKE_FORM}, or empty",
        description="A Mooncake Store: a tier behind memory and disk, for blocks that other machines use too. "
        "Empty: none.",
    )
    mooncake_protocol: Literal["tcp", "rdma"] = _setting(
        "tcp",
        room="tiers",
        allowed="tcp or rdma",
        description="Protocol by which Mooncake's records travel.",
    )
    mooncake_device: str = _setting(
        "",
        room="tiers",
        allowed="names of RDMA devices with commas between them, or empty for all",
        description="RDMA devices that Mooncake may use.",
        max_length=256,
    )
    mooncake_metadata: str = _setting(
        "P2PHANDSHAKE",
        room="tiers",
        allowed="P2PHANDSHAKE, or the value that Mooncake's own clients use",
        description="The service by which Mooncake's clients find each other. P2PHANDSHAKE: they ask each other.",
        max_length=256,
    )
    mooncake_host: str = _setting(
        "127.0.0.1",
        room="tiers",
        allowed="an address or name of this machine that the stores can reach",
        description="Name of this machine in the Mooncake Store.",
        max_length=256,
    )
    custom_tier: ClassPath = _setting(
        "",
        room="tiers",
        allowed="module.path:Class, or empty",
        description="Class of a tier that is not part of kvoffload, behind memory and disk. The server imports the "
        "module and runs its code. Empty: none.",
        max_length=256,
    )
    custom_tier_place: PlaceText = _setting(
        "",
        room="tiers",
        allowed="a text without passwords, as the class of custom_tier expects it",
        description="Place of the records of custom_tier.",
        max_length=1024,
    )
    remote_write: Literal["write_through", "write_back", "second_use"] = _setting(
        "write_through",
        room="server",
        allowed="write_through, write_back or second_use",
        description="When blocks are written to a store that other machines use too. The values mean the same as in "
        "disk_write.",
    )
    remote_queue: Duration = _setting(
        2.0,
        room="server",
        allowed="a duration from 10ms to 60s",
        description="How far writes to such a store may be behind, by its measured speed. Blocks beyond that are not "
        "written.",
        ge=0.01,
        le=60.0,
    )
    remote_timeout: Duration = _setting(
        1.0,
        room="tiers",
        allowed="a duration from 10ms to 60s",
        description="How long such a store may take for one answer. One that takes longer is not asked again before it "
        "has answered a probe.",
        ge=0.01,
        le=60.0,
    )
    remote_connections: Count = _setting(
        4,
        room="tiers",
        allowed="a number from 1 to 64",
        description="Number of connections to each store that other machines use too. Each one uses a thread.",
        ge=1,
        le=64,
    )
    remote_compress: Literal["auto", "on", "off"] = _setting(
        "off",
        room="tiers",
        allowed="auto, on or off, in quotes",
        description="Whether records are sent to such a store in a lossless code. The values mean the same as in "
        "disk_compress; auto goes by the measured speed of each store.",
    )
    hand_over: Duration = _setting(
        20.0,
        room="tiers",
        allowed="a duration from 0s to 1h; 0 for not at all",
        description="How long a server that is stopped may write blocks to other servers of its fleet and to its "
        "stores. It does so if no engine is connected, because its memory is lost then. Those that are worth most go "
        "first.",
        ge=0.0,
        le=3600.0,
    )
    seal_key_file: SecretFilePath = _setting(
        "",
        room="tiers",
        allowed="the absolute path of a file that only this user can read, or empty",
        description="A file of `kvoffload keys seal`, with whose keys all records on disk and in stores that other "
        "machines use too are sealed (AES-256-GCM). The first key seals, all of them open. Records that are not sealed "
        "are not read then. Empty: records are not sealed.",
    )
    promote_deadline: Duration = _setting(
        2.0,
        room="connector",
        allowed="a duration from 0s to 60s; 0 for not at all",
        description="How long a request waits for blocks that are promoted from slower tiers. Blocks that came by then "
        "are used.",
        ge=0.0,
        le=60.0,
    )
    arrival_deadline: Duration = _setting(
        2.0,
        room="connector",
        allowed="a duration from 0s to 60s; 0 for not at all",
        description="How long a request waits for blocks that another engine has computed for it and is saving. Blocks "
        "that came by then are used.",
        ge=0.0,
        le=60.0,
    )
    events_interval: EventsInterval = _setting(
        0.0,
        room="connector",
        allowed="a duration from 10s to 24h; 0 for never",
        description="How often the events of an engine with --kv-events-config tell again which blocks are there, for "
        "routers that were started later than the engine.",
        ge=0.0,
        le=86400.0,
    )
    save_policy: Literal["auto", "eager", "on_evict", "second_use"] = _setting(
        "auto",
        room="connector",
        allowed="auto, eager, on_evict or second_use",
        description="When a block is saved: as soon as it is full, when the engine is about to lose it, or when it is "
        "used a second time. auto is eager while memory has room, then second use or eviction, whichever is first.",
    )
    load_policy: Literal["faster", "always"] = _setting(
        "faster",
        room="connector",
        allowed="faster or always",
        description="When a hit is loaded: if computing it would take more of the engine's time, or always.",
    )
    verify: Literal["tiers", "always"] = _setting(
        "tiers",
        room="cache",
        allowed="tiers or always",
        description="When a record's digest is checked: as its bytes cross a tier, or on every load as well.",
    )
    whole_prompts: Switch = _setting(
        False,
        room="connector",
        allowed="true or false",
        description="Restore a prompt to its end if all of it is cached, and compute one token, in models of full "
        "attention alone. Faster if blocks are long; logits may differ in the last bits from those of a local hit.",
    )
    shared_shapes: Switch = _setting(
        False,
        room="connector",
        allowed="true or false",
        description="Save by KV heads, so that engines of one model find each other's blocks whatever their "
        "tensor-parallel sizes. Restored blocks are then as another engine computed them, not bit for bit those of "
        "this engine's own hit.",
    )
    self_test: Switch = _setting(
        True,
        room="kvspec",
        allowed="true or false",
        description="Save, overwrite, load and compare a pattern in a free block of every group before the first "
        "request.",
    )
    acquire_deadline: Duration = _setting(
        0.05,
        room="client",
        allowed="a duration from 1ms to 60s",
        description="Least time that a request waits for the server's answer to a hit before it counts as a miss. For "
        "a long prefix it waits a quarter of the time that computing the prefix would take, if that is longer.",
        ge=0.001,
        le=60.0,
    )
    step_budget: Duration = _setting(
        0.001,
        room="client",
        allowed="a duration from 100us to 1s",
        description="Time that all of kvoffload's calls together may take in one step of the engine's scheduler.",
        ge=0.0001,
        le=1.0,
    )
    copy_threads: Count = _setting(
        0,
        room="transfer",
        allowed="a whole number from 0 to 256; 0 means one per two cores, at most 8",
        description="Threads of the host copy engine.",
        ge=0,
        le=256,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info",
        room="cli",
        allowed="debug, info, warning or error",
        description="The least severe log line that is written.",
    )
