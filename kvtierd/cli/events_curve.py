"""Keys with which ``kvtierd events`` subscribes to an audience that speaks CURVE.

From files or variables, never from the command line, where everybody on the machine could read them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvtierd.errors import ConfigError

if TYPE_CHECKING:
    from kvtierd.config.audiences import Audience
    from kvtierd.edges.curve import ClientKeys

SERVER_VARIABLE = "KVTIERD_CURVE_SERVER_KEY"
SECRET_VARIABLE = "KVTIERD_CURVE_SECRET_KEY"  # noqa: S105 - a name


def add_curve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name key files."""
    parser.add_argument(
        "--server-key",
        metavar="FILE",
        help=f"kvtierd's public CURVE key (default: {SERVER_VARIABLE}, or what --config leads to)",
    )
    parser.add_argument(
        "--secret-key",
        metavar="FILE",
        help=f"our own secret CURVE key (default: {SECRET_VARIABLE}, or a new one)",
    )


def client_keys(
    args: argparse.Namespace, audience: Audience | None, environ: Mapping[str, str] = os.environ
) -> ClientKeys | None:
    """Return the keys, or ``None`` if nothing says that CURVE is spoken.

    ``audience``: as the tier file has it; whoever can read its secret key's file needs no other.

    Raises:
        ConfigError: a file or variable holds no such key; never shows its content.
    """
    server = _given(args.server_key, SERVER_VARIABLE, "public", environ)
    if server is None and audience is not None and audience.curve is not None:
        from kvtierd.edges.curve import CurveKeys

        server = CurveKeys.load(audience.name, audience.curve.secret_key_file, ()).public
    if server is None:
        return None
    import zmq

    from kvtierd.edges.curve import ClientKeys, public_of

    secret = _given(args.secret_key, SECRET_VARIABLE, "secret", environ)
    if secret is None:
        secret = zmq.curve_keypair()[1]
    public_of(secret, args.secret_key or SECRET_VARIABLE)
    return ClientKeys(server, secret)


def _given(file: str | None, variable: str, kind: str, environ: Mapping[str, str]) -> bytes | None:
    if file is not None:
        from kvtierd.edges.curve import read_key

        return read_key("CURVE", Path(file), kind)
    key = environ.get(variable)
    if key is not None and len(key) != 40:
        raise ConfigError(f"{variable} holds no CURVE {kind} key")
    return None if key is None else key.encode()
