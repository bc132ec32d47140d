"""Files of keys: never overwritten, the secret one readable by its owner alone, and one clear line for each mistake."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from kvoffload.errors import ConfigError
from kvoffload.key_files import (
    add_seal_key,
    is_public_key,
    read_pair,
    read_private_text,
    read_public_key,
    read_seal_keys,
    write_new_pair,
)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_new_pair(tmp_path / "server")


def test_a_pair_comes_back_as_it_was_written(pair: tuple[Path, Path]) -> None:
    secret_file, public_file = pair
    found = read_pair(secret_file)
    assert zmq.curve_public(found.secret) == found.public
    assert read_public_key(secret_file) == read_public_key(public_file) == found.public.decode()
    assert is_public_key(read_public_key(public_file))
    assert found.secret.decode() not in repr(found)
    assert found.secret.decode() not in public_file.read_text()


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_the_secret_one_is_for_its_owner_alone(tmp_path: Path, mask: int) -> None:
    former = os.umask(mask)
    try:
        secret_file, public_file = write_new_pair(tmp_path / "masked")
    finally:
        os.umask(former)
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(public_file.stat().st_mode) == 0o644


def test_a_folder_gets_files_with_our_name(tmp_path: Path) -> None:
    assert [file.name for file in write_new_pair(tmp_path)] == ["kvoffload.key", "kvoffload.pub"]


@pytest.mark.parametrize("suffix", [".key", ".pub"])
def test_nothing_is_overwritten(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"n{suffix}").write_text("mine")
    with pytest.raises(ConfigError, match=f"key file {tmp_path}/n{suffix} exists already; choose another name"):
        write_new_pair(tmp_path / "n")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(f"n{suffix}", "mine")]


def test_a_new_key_that_seals_stands_in_front_of_the_older_ones(tmp_path: Path) -> None:
    file = tmp_path / "seal"
    assert add_seal_key(file) == 1
    [first] = read_seal_keys(file)
    assert add_seal_key(file) == 2
    second, last = read_seal_keys(file)
    assert (last, len({first, second}), len(second)) == (first, 2, 32)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["seal"]
    # The owner may remove keys.
    file.write_text(f"# mine\n\nseal {second.hex()}\n")
    assert read_seal_keys(file) == [second]
    for count in range(2, 33):
        assert add_seal_key(file) == count
    with pytest.raises(ConfigError, match="has 32 keys already; remove the last ones"):
        add_seal_key(file)


SEAL_LINE = f"seal {64 * '0'}\n"


@pytest.mark.parametrize(
    "text", ["", "seal", "seal " + 63 * "0", "seal " + 65 * "0", SEAL_LINE + "secret", 33 * SEAL_LINE, 99 * SEAL_LINE]
)
def test_another_file_is_no_list_of_keys_that_seal_and_stays(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other"
    file.touch(0o600)
    file.write_text(text)
    for use in (read_seal_keys, add_seal_key):
        with pytest.raises(ConfigError, match="is no list of 1 to 32 keys that seal; make one with"):
            use(file)
    assert file.read_text() == text


def test_keys_that_seal_are_for_their_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "seal"
    add_seal_key(file)
    file.chmod(0o640)
    for use in (read_seal_keys, add_seal_key):
        with pytest.raises(ConfigError, match="is for others too, its mode is 0640"):
            use(file)
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        read_seal_keys(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        add_seal_key(tmp_path / "none" / "seal")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "n.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="exists already"):
        write_new_pair(tmp_path / "n")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/n\.key cannot be written: No such file or directory; name a folder"):
        write_new_pair(tmp_path / "none" / "n")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_secret_that_others_may_use_is_refused(pair: tuple[Path, Path], mode: int) -> None:
    pair[0].chmod(mode)
    with pytest.raises(ConfigError, match=f"is for others too, its mode is 0{mode:o}; say `chmod 600 {pair[0]}`"):
        read_pair(pair[0])


def test_what_is_no_secret_key_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    pair[1].chmod(0o600)
    text = pair[0].read_text()
    wrong = [pair[1].read_text(), "", "secret\n", text[:-5], text + "x\n", text.replace("secret ", "secret  ")]
    for at, words in enumerate([*wrong, "\0" * 10_000]):
        file = tmp_path / f"wrong{at}"
        file.touch(0o600)
        file.write_text(words)
        with pytest.raises(ConfigError, match="is no secret key; give the"):
            read_pair(file)


def test_keys_that_do_not_belong_together_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = read_public_key(write_new_pair(tmp_path / "other")[1])
    pair[0].write_text(pair[0].read_text().replace(read_public_key(pair[1]), other))
    with pytest.raises(ConfigError, match="do not belong together"):
        read_pair(pair[0])


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for read in (read_pair, read_public_key):
        with pytest.raises(ConfigError, match=r"key file .*none cannot be read: No such file or directory"):
            read(tmp_path / "none")
    with pytest.raises(ConfigError, match="is no file"):
        read_private_text(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is no file"):
        read_private_text(tmp_path / "pipe")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="is no key; give a file of `kvoffload keys new`"):
        read_public_key(tmp_path / "text")
