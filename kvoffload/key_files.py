"""Keys in files that are for their owner alone: pairs of CurveZMQ, whose public keys have files of their own, and keys
that seal records."""

from __future__ import annotations

import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kvoffload.errors import ConfigError

SECRET_SUFFIX = ".key"
PUBLIC_SUFFIX = ".pub"
KEY_FORM = "a public key of 40 characters, as `kvoffload keys show FILE` prints it"

_TEXT_BYTES = 4096
_KEY = r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_LINES = re.compile(rf"(?:#[^\n]*\n)*(?:secret (?P<secret>{_KEY})\n)?public (?P<public>{_KEY})\n?", re.ASCII)
_PUBLIC_KEY = re.compile(_KEY, re.ASCII)
_SEAL_KEY_BYTES = 32
_SEAL_KEYS = 32
"""The most keys in a file of keys that seal."""
_SEAL_LINE = re.compile(rf"seal ([0-9a-f]{{{2 * _SEAL_KEY_BYTES}}})", re.ASCII)


@dataclass(frozen=True)
class KeyPair:
    """Holds two keys as ZeroMQ takes them: 40 bytes of Z85 each."""

    public: bytes
    secret: bytes = field(repr=False)


def is_public_key(text: str) -> bool:
    return _PUBLIC_KEY.fullmatch(text) is not None


def write_new_pair(name: Path) -> tuple[Path, Path]:
    """A new pair in NAME.key and NAME.pub; a folder gets `kvoffload.key` and `kvoffload.pub`.

    ConfigError: one of the files exists already, or cannot be written. Then neither is left behind.
    """
    import zmq

    base = name / "kvoffload" if name.is_dir() else name
    secret_file, public_file = (base.with_name(base.name + suffix) for suffix in (SECRET_SUFFIX, PUBLIC_SUFFIX))
    public, secret = (key.decode() for key in zmq.curve_keypair())
    head = "# Made by `kvoffload keys new`."
    _write_new(secret_file, f"{head} Keep it to yourself.\nsecret {secret}\npublic {public}\n", 0o600)
    try:
        _write_new(public_file, f"{head} For everyone.\npublic {public}\n", 0o644)
    except ConfigError:
        secret_file.unlink()
        raise
    return secret_file, public_file


def read_pair(file: Path) -> KeyPair:
    """Reads a pair from its secret file. ConfigError: it cannot be read, is for others to read too, or is no secret
    key."""
    text = read_private_text(file)
    found = _LINES.fullmatch(text)
    if found is None or found["secret"] is None:
        raise _refuse(file, "is no secret key", "give the .key file that `kvoffload keys new` wrote")
    pair = KeyPair(found["public"].encode(), found["secret"].encode())
    import zmq

    if zmq.curve_public(pair.secret) != pair.public:
        raise _refuse(file, "has two keys that do not belong together", "make a new pair with `kvoffload keys new`")
    return pair


def read_pair_for(key_file: str, *, setting: str, address: str) -> KeyPair:
    """Reads the pair without which a server does not listen at `address`, which `setting` names.

    ConfigError: `key_file` is empty, or `read_pair` refuses the file. A loopback address needs keys, too: the kernel
    does not report which user connects over TCP, so the mode of the server's Unix socket would protect nothing.
    """
    if not key_file:
        raise ConfigError(
            f"setting {setting!r} = {address!r} without key_file: everyone who reaches that address could connect, "
            "other users of this machine included",
            remedy="make keys with `kvoffload keys new NAME`, and set key_file to NAME.key",
        )
    return read_pair(Path(key_file))


def read_public_key(file: Path) -> str:
    """Reads the public key from either file of a pair. ConfigError: it cannot be read, or is no key."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_TEXT_BYTES).decode("ascii", "replace")
    except OSError as fault:
        raise _refuse(file, f"cannot be read: {fault.strerror}", "give a file of `kvoffload keys new`") from fault
    found = _LINES.fullmatch(text)
    if found is None:
        raise _refuse(file, "is no key", "give a file of `kvoffload keys new`")
    return str(found["public"])


def add_seal_key(file: Path) -> int:
    """Puts a new key in front of those in a file of keys that seal, or makes the file. Returns how many it has then.

    ConfigError: the file is none of these or has all the keys that it may have, or cannot be written. Then it stays as
    it was.
    """
    keys = read_seal_keys(file) if os.path.lexists(file) else []
    if len(keys) == _SEAL_KEYS:
        raise _refuse(file, f"has {len(keys)} keys already", "remove the last ones, which sealed the oldest records")
    lines = [f"seal {key.hex()}\n" for key in (secrets.token_bytes(_SEAL_KEY_BYTES), *keys)]
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    _write_new(new, "# Made by `kvoffload keys seal`. The first key seals, all of them open.\n" + "".join(lines), 0o600)
    try:
        with new.open("rb") as written:
            os.fsync(written.fileno())  # a crash must not lose the former keys
        new.replace(file)
    except OSError as fault:
        new.unlink()
        raise _refuse(file, f"cannot be written: {fault.strerror}", "name a file, and not a folder") from fault
    return len(lines)


def read_seal_keys(file: Path) -> list[bytes]:
    """Reads the keys that seal records, the newest first. ConfigError: the file cannot be read, is for others to read
    too, or has something else in it."""
    lines = [line for line in read_private_text(file).splitlines() if line and not line.startswith("#")]
    found = [_SEAL_LINE.fullmatch(line) for line in lines]
    keys = [bytes.fromhex(one[1]) for one in found if one is not None]
    if not keys or len(keys) < len(lines) or len(keys) > _SEAL_KEYS:
        raise _refuse(file, f"is no list of 1 to {_SEAL_KEYS} keys that seal", "make one with `kvoffload keys seal`")
    return keys


def read_private_text(file: Path) -> str:
    """Reads a file that holds a secret. ConfigError: it cannot be read, or is for others to read too."""
    try:
        # Without O_NONBLOCK, opening a pipe that has no writer would block.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as fault:
        raise _refuse(file, f"cannot be read: {fault.strerror}", "give a file of this user") from fault
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise _refuse(file, "is no file", "give the file that holds the secret")
        if facts.st_mode & 0o077:
            mode = stat.S_IMODE(facts.st_mode)
            raise _refuse(file, f"is for others too, its mode is {mode:04o}", f"say `chmod 600 {file}`")
        return os.read(descriptor, _TEXT_BYTES).decode("ascii", "replace")
    finally:
        os.close(descriptor)


def _write_new(file: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with open(descriptor, "w", encoding="ascii") as opened:
            os.fchmod(descriptor, mode)
            opened.write(text)
    except FileExistsError as fault:
        raise _refuse(file, "exists already", "choose another name, or remove it first") from fault
    except OSError as fault:
        reason = f"cannot be written: {fault.strerror}"
        raise _refuse(file, reason, "name a folder that this user may write") from fault


def _refuse(file: Path, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"key file {file} {reason}", remedy=remedy, path=str(file))
