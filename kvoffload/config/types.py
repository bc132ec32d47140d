"""Types for the values of settings as users write them, each with the function that reads or checks it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt

from kvoffload.config.mooncake_address import parse_mooncake_address
from kvoffload.config.s3_address import parse_s3_address, parse_s3_endpoint
from kvoffload.config.secrets import has_secrets
from kvoffload.config.tcp_address import parse_tcp_address
from kvoffload.config.valkey_address import parse_valkey_address
from kvoffload.units import parse_duration, parse_size

_SECRET_KEY = re.compile(r"[!-~]{40}", re.ASCII)
"""Matches a key of CurveZMQ, which users may write by mistake in place of the name of its file."""


_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def split_folders(value: str) -> list[str]:
    """Splits the setting `disk` into folders."""
    return [part.strip().rstrip("/") for part in value.split(",") if part.strip()]


def read_size_or_auto(value: Any) -> Any:
    return value if value == "auto" else read_size(value)


def read_size(value: Any) -> int:
    if not isinstance(value, str | int):
        raise ValueError("not a size")
    return parse_size(value)


def read_duration(value: Any) -> float:
    return parse_duration(value)


def check_events_interval(value: float) -> float:
    # All that a pool has is told each time.
    if 0 < value < 10:
        raise ValueError("too short")
    return value


def check_socket_path(value: str) -> str:
    if len(value.encode()) > 107:
        raise ValueError("longer than the kernel takes")
    _check_no_address(value)
    return value


def _check_no_address(value: str) -> None:
    # Paths are printed as they are, and an address may have a password in it.
    if "://" in value or has_secrets(value):
        raise ValueError("an address, and not a path")


def check_folders(value: str) -> str:
    parts = split_folders(value)
    for part in parts:
        _check_no_address(part)
        if not part.startswith("/") or not part.isprintable():
            raise ValueError(f"{part!r} is no absolute path")
    if len(set(parts)) < len(parts):
        raise ValueError("a folder is named twice")
    return value


def check_file_path(value: str) -> str:
    _check_no_address(value)
    if value and not (value.startswith("/") and value.isprintable()):
        raise ValueError(f"{value!r} is no absolute path")
    return value


def check_secret_file_path(value: str) -> str:
    if value and not (value.startswith("/") and value.isprintable()):
        raise ValueError("no absolute path; the value is hidden, because it could be the secret itself")
    return check_file_path(value)


def check_key_file_path(value: str) -> str:
    if _SECRET_KEY.fullmatch(value) and not value.startswith(("/", ".")) and not value.endswith(".key"):
        raise ValueError("a key, and not a file that has it")
    _check_no_address(value)
    return value


def check_valkey_address(value: str) -> str:
    return str(parse_valkey_address(value)) if value else value


def check_s3_address(value: str) -> str:
    return str(parse_s3_address(value)) if value else value


def check_s3_endpoint(value: str) -> str:
    return parse_s3_endpoint(value) if value else value


def check_mooncake_address(value: str) -> str:
    return str(parse_mooncake_address(value)) if value else value


def check_tcp_address(value: str) -> str:
    return str(parse_tcp_address(value)) if value else value


def check_class_path(value: str) -> str:
    if value and not _CLASS_PATH.fullmatch(value):
        raise ValueError("not the path of a module and the name of a class in it")
    return value


def check_place(value: str) -> str:
    if has_secrets(value):
        raise ValueError("a password; put it into a file that only this user can read, and name that")
    if not value.isprintable():
        raise ValueError("more than one line of letters that can be printed")
    return value


def read_switch(value: Any) -> Any:
    # A flag has only text to offer; a file and an engine have real booleans.
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def read_count(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def read_price(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("not a number")
    return float(value)


Size = Annotated[int, BeforeValidator(read_size)]
SizeOrAuto = Annotated[int | Literal["auto"], BeforeValidator(read_size_or_auto)]
Duration = Annotated[float, BeforeValidator(read_duration)]
EventsInterval = Annotated[Duration, AfterValidator(check_events_interval)]
Switch = Annotated[StrictBool, BeforeValidator(read_switch)]
SocketPath = Annotated[str, AfterValidator(check_socket_path)]
Folders = Annotated[str, AfterValidator(check_folders)]
TcpEndpoint = Annotated[str, AfterValidator(check_tcp_address)]
FilePath = Annotated[str, AfterValidator(check_file_path)]
SecretFilePath = Annotated[str, AfterValidator(check_secret_file_path)]
KeyFilePath = Annotated[str, AfterValidator(check_key_file_path)]
ValkeyUrl = Annotated[str, AfterValidator(check_valkey_address)]
S3Url = Annotated[str, AfterValidator(check_s3_address)]
S3Endpoint = Annotated[str, AfterValidator(check_s3_endpoint)]
MooncakeUrl = Annotated[str, AfterValidator(check_mooncake_address)]
ClassPath = Annotated[str, AfterValidator(check_class_path)]
PlaceText = Annotated[str, AfterValidator(check_place)]
Price = Annotated[float, BeforeValidator(read_price), Field(ge=0, le=1e9)]
Count = Annotated[StrictInt, BeforeValidator(read_count)]
