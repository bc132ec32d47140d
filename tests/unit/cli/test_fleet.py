"""Which fleet a server belongs to, by what is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.cli.below import choose_tiers
from kvoffload.cli.fleet import FleetPlan, admit, links_a_peer, plan_fleet
from kvoffload.cli.serve import choose_remote
from kvoffload.config.sources import Settings, load_settings
from kvoffload.config.tcp_address import parse_tcp_address
from kvoffload.errors import ConfigError
from kvoffload.key_files import read_public_key, write_new_pair
from kvoffload.peers.fleet_member import MAX_MEMBERS, FleetMember
from kvoffload.peers.peer_server import MAX_LINKS
from kvoffload.server import Guest
from kvoffload.server.config import ServerConfig, read_server_config

HERE, THERE = "tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556"


def settings_of(**more: object) -> Settings:
    return load_settings(flags={"listen": HERE, "peer_listen": "tcp://127.0.0.1:7600", **more}).settings


def config_of(*peers: dict[str, str], **more: object) -> ServerConfig:
    return read_server_config({"peers": list(peers), **more}, origin="file x")


def plan(settings: Settings, config: ServerConfig) -> FleetPlan:
    made = plan_fleet(settings, config)
    assert made is not None
    return made


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Public keys by name; NAME.key lies in tmp_path."""
    return {name: read_public_key(write_new_pair(tmp_path / name)[1]) for name in ("here", "there")}


@pytest.fixture
def own(tmp_path: Path, keys: dict[str, str]) -> dict[str, str]:
    """The setting by which this server has its keys."""
    return {"key_file": str(tmp_path / "here.key")}


@pytest.fixture
def there(keys: dict[str, str]) -> dict[str, str]:
    """A row of [[peers]]: the other server."""
    return {"address": THERE, "key": keys["there"]}


def test_without_peers_there_is_no_fleet() -> None:
    assert plan_fleet(load_settings().settings, ServerConfig()) is None


def test_on_loopback_members_are_known_by_their_keys_too(
    own: dict[str, str], there: dict[str, str], keys: dict[str, str]
) -> None:
    made = plan(settings_of(**own, peer_link="trusted"), config_of({"address": HERE, "key": keys["here"]}, there))
    assert not made.peering.is_sealed
    assert str(made.peering.address) == "tcp://127.0.0.1:7600"
    assert made.tier.settings.name == "peer"
    assert made.tier.place.describe() == "1 peer"


def test_elsewhere_members_are_known_by_their_keys(tmp_path: Path, keys: dict[str, str]) -> None:
    """The same file may lie on all machines: who has our own key is this one."""
    settings = settings_of(
        listen="tcp://0.0.0.0:5555", peer_listen="tcp://0.0.0.0:7600", key_file=str(tmp_path / "here.key")
    )
    peers = [
        {"address": "tcp://10.0.0.1:5555", "key": keys["here"]},
        {"address": "tcp://10.0.0.2:5555", "key": keys["there"]},
    ]
    config = config_of(*peers)
    assert plan(settings, config).tier.place.describe() == "1 peer"
    guests = config.make_guests()
    assert {guest.name for guest in guests.values() if guest.is_peer} == {"tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555"}


def test_a_disk_takes_what_lives_here_and_peers_the_rest(own: dict[str, str], there: dict[str, str]) -> None:
    settings = settings_of(**own, disk="/nvme0/kv", disk_size="4GiB", valkey="valkey://127.0.0.1")
    config = config_of(there)
    fleet = plan(settings, config)
    disk, peers, valkey = choose_tiers(settings, config, fleet)[""]
    assert disk.settings.wants == fleet.place.is_home
    assert peers.settings.wants == fleet.place.lives_elsewhere
    assert valkey.settings.wants is None
    assert [tier.settings.name for tier in (disk, peers, valkey)] == ["disk", "peer", "valkey"]


def test_a_registry_needs_keys_a_secret_and_an_address_that_others_know(tmp_path: Path, own: dict[str, str]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("only the fleet knows\n")
    secret.chmod(0o600)
    registry = {"fleet_registry": "valkey://127.0.0.1", "fleet_name": "blue", "fleet_secret_file": str(secret)}
    made = plan(settings_of(**registry, **own), ServerConfig())
    assert made.tier.place.describe() == "0 peers and fleet blue at valkey://127.0.0.1:6379/0"
    assert choose_remote(settings_of(**registry, **own), ServerConfig(), made.guests) is not None
    with pytest.raises(ConfigError, match=r"'peer_listen' = .* without key_file"):
        plan_fleet(settings_of(**registry), ServerConfig())
    with pytest.raises(ConfigError, match=r"'listen' = .*0.0.0.0.* others have to reach it"):
        plan_fleet(settings_of(**registry, **own, listen="tcp://0.0.0.0:5555"), ServerConfig())
    with pytest.raises(ConfigError, match=r"'listen' = .*:0' .* give the address .* and a port"):
        plan_fleet(settings_of(**registry, **own, listen="tcp://127.0.0.1:0"), ServerConfig())
    with pytest.raises(ConfigError, match="'fleet_secret_file' = '' holds no secret; name a file with at least 16"):
        plan_fleet(settings_of(**(registry | own | {"fleet_secret_file": ""})), ServerConfig())
    with pytest.raises(ConfigError, match="a fleet_registry is set, and nothing listens for peers"):
        plan_fleet(settings_of(**registry, **own, peer_listen=""), ServerConfig())


def test_who_is_announced_is_let_in_until_it_goes(keys: dict[str, str]) -> None:
    members = [FleetMember(address=parse_tcp_address(THERE), key=key) for key in keys.values()]
    guests: dict[str, Guest] = {}
    admit(guests, "red", members)
    assert guests == {key: Guest(domain="red", name=THERE, is_peer=True) for key in keys.values()}
    admit(guests, "red", members[:1])
    assert set(guests) == {members[0].key}


def test_a_peer_is_known_as_long_as_it_is_named_or_announced(own: dict[str, str], there: dict[str, str]) -> None:
    made = plan(settings_of(**own), config_of(there))
    other = FleetMember(address=parse_tcp_address("tcp://127.0.0.1:5557"), key="k" * 40)
    is_known = made.peering.is_known
    assert is_known(THERE)
    assert not is_known(str(other.address))
    admit(made.guests, "", [other])
    assert is_known(str(other.address))
    admit(made.guests, "", [])
    assert not is_known(str(other.address))
    assert not is_known("")


def test_links_of_a_full_fleet_fit_what_a_server_takes() -> None:
    assert (MAX_MEMBERS - 1) * links_a_peer(MAX_MEMBERS) <= MAX_LINKS
    assert links_a_peer(MAX_MEMBERS) > 4, "the default of remote_connections, and one for probes"


def test_a_fleet_has_no_more_members_than_agree_on_homes(own: dict[str, str]) -> None:
    """A server need not be named itself."""
    named = [{"address": f"tcp://127.0.0.1:{port}", "key": f"{port:040}"} for port in range(6000, 6000 + MAX_MEMBERS)]
    assert plan(settings_of(**own), config_of(*named[1:])).tier.place.describe() == f"{MAX_MEMBERS - 1} peers"
    with pytest.raises(ConfigError, match=r"65 servers are named in \[\[peers\]\].*a fleet has 64 at most"):
        plan_fleet(settings_of(**own), config_of(*named))


def test_what_does_not_fit_is_refused_in_one_line(own: dict[str, str], there: dict[str, str]) -> None:
    nobody = settings_of(peer_listen="")
    with pytest.raises(ConfigError, match=r"\[\[peers\]\] are named, and nothing listens for peers.*set peer_listen"):
        plan_fleet(nobody, config_of(there))
    with pytest.raises(ConfigError, match=r"'peer_listen' = .* without listen"):
        plan_fleet(settings_of(**own, listen=""), ServerConfig())
    for address in ("tcp://127.0.0.1:7600", "tcp://[::1]:7600", "tcp://0.0.0.0:7600"):
        for config in (ServerConfig(), config_of(there)):
            with pytest.raises(
                ConfigError, match=r"'peer_listen' = .* without key_file: .* make keys with `kvoffload ke"
            ):
                plan_fleet(settings_of(peer_listen=address), config)
    with pytest.raises(ConfigError, match=r"peers\[0\].key is missing in file x; allowed is a public key"):
        config_of({"address": THERE})
    with pytest.raises(ConfigError, match=r"peers\[0\].address = 'here' in file x"):
        config_of(there | {"address": "here"})
    with pytest.raises(ConfigError, match=r"peers\[1\].address = .* is that of peers\[0\].address too"):
        config_of(there, there | {"key": "k" * 40})
    domains = [{"name": name, "memory": "64MiB"} for name in ("red", "blue")]
    two = config_of(there, domains=domains)
    with pytest.raises(ConfigError, match=r"'peer_listen' = .* with 2 domains"):
        choose_tiers(settings_of(**own), two, plan_fleet(settings_of(**own), two))
