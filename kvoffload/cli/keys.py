"""`kvoffload keys`: pairs of keys for connections that leave the machine, and keys that seal records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvoffload.key_files import add_seal_key, read_public_key, write_new_pair

keys_app = typer.Typer(
    help="Make keys for TCP connections, and keys that seal records.", no_args_is_help=True, rich_markup_mode=None
)


@keys_app.command(short_help="Make a secret key, and a public one for others.")
def new(
    name: Annotated[Path, typer.Argument(help="Two files are made, NAME.key and NAME.pub; or in this folder.")],
) -> None:
    """Make a pair: a secret key that only this user can read, and a public key to be told to others."""
    secret, public = write_new_pair(name)
    typer.echo(f"secret key in {secret}, public key in {public}:")
    typer.echo(read_public_key(public))


@keys_app.command()
def show(file: Annotated[Path, typer.Argument(help="Either file of a pair.")]) -> None:
    """Print the public key."""
    typer.echo(read_public_key(file))


@keys_app.command(short_help="Make a key that seals records, or a newer one.")
def seal(
    file: Annotated[Path, typer.Argument(help="A file that does not exist yet, or one that this command made.")],
) -> None:
    """Make a key that seals records, or put a new one in front of those in the file: the older ones still open."""
    count = add_seal_key(file)
    typer.echo(f"{file} has {count} {'key' if count == 1 else 'keys'}, of which the first seals new records")
