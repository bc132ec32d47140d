"""The tiers that a server's settings give it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvoffload.cli.below import choose_tiers
from kvoffload.config.sources import Settings, load_settings
from kvoffload.errors import ConfigError
from kvoffload.key_files import add_seal_key, read_seal_keys
from kvoffload.server.config import ServerConfig, read_server_config
from kvoffload.server.tiering.settings import WriteRule
from kvoffload.tiers.disk import DiskSettings
from kvoffload.tiers.mooncake import CLIENTS, MooncakeSettings
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.s3 import S3Settings
from kvoffload.tiers.valkey import ValkeySettings
from kvoffload.units import GIB


def disk_settings(**more: object) -> Settings:
    return load_settings(flags={"disk": "/nvme0/kv, /nvme1/kv/", "disk_size": "4GiB", **more}).settings


def test_each_folder_is_a_device_of_the_size_that_is_set() -> None:
    settings = disk_settings(disk_write="write_back", disk_queue="500ms", disk_daily="1TiB", disk_compress="on")
    [plan] = choose_tiers(settings, ServerConfig())[""]
    assert isinstance(plan.place, DiskSettings)
    assert [(str(one.path), one.capacity_bytes) for one in plan.place.folders] == [
        ("/nvme0/kv", 4 * GIB),
        ("/nvme1/kv", 4 * GIB),
    ]
    assert plan.place.daily_bytes == 1 << 40
    assert plan.place.compress is Coding.ON
    assert (plan.settings.write, plan.settings.queue_s) == (WriteRule.BACK, 0.5)
    assert plan.place.describe() == "8GiB of disk in 2 folders"
    assert choose_tiers(load_settings().settings, ServerConfig()) == {}


@pytest.mark.parametrize("size", ["0B", "512MiB"])
def test_a_disk_without_a_size_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match=r"setting 'disk_size' = .* with disk = .*; allowed is .* at least 1GiB"):
        choose_tiers(disk_settings(disk_size=size), ServerConfig())


def test_domains_do_not_share_a_disk() -> None:
    domains = [{"name": "red", "memory": "64MiB"}, {"name": "blue", "memory": "64MiB"}]
    config = read_server_config({"domains": domains}, origin="file x")
    with pytest.raises(ConfigError, match="with 2 domains: blocks of one domain could come to another's memory"):
        choose_tiers(disk_settings(), config)
    alone = read_server_config({"domains": domains[:1]}, origin="file x")
    assert choose_tiers(disk_settings(), alone).keys() == {"red"}


@pytest.mark.parametrize(
    ("disk", "fault"), [("kv", "'kv' is no absolute path"), ("/a,/b,/a/", "a folder is named twice")]
)
def test_folders_are_named_so_that_any_process_finds_them(disk: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        disk_settings(disk=disk)


def test_valkey_lies_below_the_disk(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("open\n")
    secret.chmod(0o600)
    valkey = {
        "valkey": "valkeys://me@far/2",
        "valkey_password_file": str(secret),
        "valkey_ttl": "2h",
        "remote_write": "second_use",
        "remote_queue": "5s",
        "remote_timeout": "200ms",
        "remote_connections": "7",
        "remote_compress": "auto",
    }
    near, far = choose_tiers(disk_settings(**valkey), ServerConfig())[""]
    assert isinstance(near.place, DiskSettings)
    assert isinstance(far.place, ValkeySettings)
    assert far.place.describe() == "valkeys://me@far:6379/2"
    assert (far.place.password, far.place.ttl_s) == ("open", 7200)
    assert (near.place.compress, far.place.compress) == (Coding.OFF, Coding.AUTO)
    assert (far.place.call_timeout_s, far.settings.look_timeout_s, far.place.connections) == (0.2, 0.2, 7)
    assert (far.settings.name, far.settings.write, far.settings.queue_s) == ("valkey", WriteRule.SECOND_USE, 5.0)
    assert "open" not in repr(far.place)
    [alone] = choose_tiers(load_settings(flags={"valkey": "valkey://far"}).settings, ServerConfig())[""]
    assert isinstance(alone.place, ValkeySettings)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("valkey", "redis://far", "no scheme and host"),
        ("valkey", "valkey://me:open@far", "a password has a file of its own"),
        ("valkey_password_file", "secret", "no absolute path"),
        ("remote_connections", "0", "greater than or equal to 1"),
        ("s3", "https://cache", "no scheme and bucket"),
        ("s3", "s3://me:open@cache", "not allowed here; allowed is s3://bucket"),
        ("s3_endpoint", "store.example:9000", "no http:// or https:// and host"),
        ("s3_endpoint", "https://me:open@far", "keys have a file of their own"),
        ("s3_region", "eu west", "s3_region"),
        ("s3_ca_file", "ca.pem", "no absolute path"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_set(name: str, value: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load_settings(flags={name: value})


def test_a_password_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("open")
    secret.chmod(0o644)
    settings = load_settings(flags={"valkey": "valkey://far", "valkey_password_file": str(secret)}).settings
    with pytest.raises(ConfigError):
        choose_tiers(settings, ServerConfig())


def test_domains_do_not_share_a_store() -> None:
    domains = [{"name": "red", "memory": "64MiB"}, {"name": "blue", "memory": "64MiB"}]
    config = read_server_config({"domains": domains}, origin="file x")
    with pytest.raises(ConfigError, match=r"setting 'valkey' = .* with 2 domains"):
        choose_tiers(load_settings(flags={"valkey": "valkey://far"}).settings, config)
    with pytest.raises(ConfigError, match=r"setting 's3' = .* with 2 domains"):
        choose_tiers(load_settings(flags={"s3": "s3://cache"}).settings, config)


def private_file(file: Path, text: str) -> str:
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


def test_s3_lies_below_valkey(tmp_path: Path) -> None:
    keys = "[default]\naws_access_key_id = me\naws_secret_access_key = sesame\n"
    s3 = {
        "valkey": "valkey://near",
        "s3": "s3://cache/kv/",
        "s3_endpoint": "https://far:9000/",
        "s3_region": "eu-west-1",
        "remote_compress": "on",
        "s3_credentials_file": private_file(tmp_path / "keys", keys),
        "s3_ca_file": private_file(tmp_path / "ca.pem", "-----BEGIN CERTIFICATE-----\n"),
        "remote_timeout": "3s",
        "remote_connections": "7",
    }
    *nearer, far = choose_tiers(disk_settings(**s3), ServerConfig())[""]
    assert [plan.settings.name for plan in nearer] == ["disk", "valkey"]
    assert isinstance(far.place, S3Settings)
    assert far.place.compress is Coding.ON
    assert far.settings.name == "s3"
    assert far.place.describe() == "s3://cache/kv at https://far:9000"
    assert far.place.keys is not None
    assert (far.place.keys.key_id, far.place.keys.secret, far.place.region) == ("me", "sesame", "eu-west-1")
    assert (far.place.call_timeout_s, far.place.connections) == (3.0, 7)
    assert "sesame" not in repr(far)
    [alone] = choose_tiers(load_settings(flags={"s3": "s3://cache"}).settings, ServerConfig())[""]
    assert isinstance(alone.place, S3Settings)
    assert (alone.place.describe(), alone.place.keys) == ("s3://cache", None)


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("s3_credentials_file", "[default]\naws_access_key_id = me\n", "has no aws_secret_access_key"),
        ("s3_credentials_file", "me:sesame", "no `name = value`"),
        ("s3_ca_file", "sesame", "is no certificate that can be read"),
    ],
)
def test_what_a_file_does_not_have_is_said(tmp_path: Path, name: str, text: str, fault: str) -> None:
    settings = load_settings(flags={"s3": "s3://cache", name: private_file(tmp_path / "file", text)}).settings
    with pytest.raises(ConfigError, match=fault) as refused:
        choose_tiers(settings, ServerConfig())
    assert "sesame" not in str(refused.value)
    (tmp_path / "file").unlink()
    with pytest.raises(ConfigError):
        choose_tiers(settings, ServerConfig())


def test_a_mooncake_store_lies_before_valkey() -> None:
    flags = {"mooncake": "mooncake://far:50051", "valkey": "valkey://far", "remote_timeout": "300ms"}
    flags["remote_compress"] = "auto"
    first, last = choose_tiers(load_settings(flags=flags).settings, ServerConfig())[""]
    assert isinstance(first.place, MooncakeSettings)
    assert first.place.describe() == "mooncake://far:50051 over tcp"
    assert (first.place.call_timeout_s, first.place.connections) == (0.3, CLIENTS)
    assert first.place.compress is Coding.AUTO
    assert (first.settings.name, last.settings.name) == ("mooncake", "valkey")


def test_a_key_file_seals_the_records_on_disk_and_in_stores(tmp_path: Path) -> None:
    file = tmp_path / "seal"
    add_seal_key(file)
    stores = {"valkey": "valkey://far", "s3": "s3://cache"}
    plans = choose_tiers(disk_settings(seal_key_file=str(file), **stores), ServerConfig())[""]
    disk, *remote = plans
    assert isinstance(disk.place, DiskSettings)
    keys = disk.place.seal_keys
    assert keys is not None
    assert [plan.settings.seal_keys for plan in remote] == [keys, keys]
    assert read_seal_keys(file)[0].hex() not in repr(plans)
    plans = choose_tiers(disk_settings(**stores), ServerConfig())[""]
    assert [plan.settings.seal_keys for plan in plans] == [None] * 3
    file.write_text("sesame")
    with pytest.raises(ConfigError, match="is no list of 1 to 32 keys that seal") as refused:
        choose_tiers(disk_settings(seal_key_file=str(file)), ServerConfig())
    assert "sesame" not in str(refused.value)


MODULE = """
from kvoffload.tiers.remote import RemotePlace

class Half(RemotePlace):
    def describe(self):
        return "half of a tier"

class Other:
    pass
"""


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("tier_of_ours", "not the path of a module and the name of a class in it; allowed is module.path:Class"),
        ("os; import x:y", "not the path of a module"),
        ("./tier.py:Tier", "not the path of a module"),
        ("no_such_module:Tier", "the module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken_tier:Tier", "the module cannot be imported: ZeroDivisionError: division by zero"),
        ("tier_of_ours:Missing", "the module has no Missing"),
        ("tier_of_ours:Other", "Other is not a tier; make it a subclass of kvoffload.tiers.remote.RemotePlace"),
        ("tier_of_ours:MODULE", "the module has no MODULE"),
        ("tier_of_ours:__name__", "__name__ is not a tier"),
        ("tier_of_ours:Half", "Half has no find_remedy, from_settings, open_tier"),
    ],
)
def test_a_class_that_is_no_tier_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, fault: str
) -> None:
    (tmp_path / "tier_of_ours.py").write_text(MODULE)
    (tmp_path / "broken_tier.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tier_of_ours", raising=False)
    with pytest.raises(ConfigError) as refused:
        choose_tiers(load_settings(flags={"custom_tier": path}).settings, ServerConfig())
    assert f"setting 'custom_tier' = {path!r}" in str(refused.value)
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_place_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="a password; put it into a file") as refused:
        load_settings(flags={"custom_tier_place": "store://me:sesame@far"})
    assert "sesame" not in str(refused.value)
