"""What the settings of an object tier may be: its url, its endpoint, and what must stand beside them.

Pure checks over plain values. No message repeats a value in which somebody may have written a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

SCHEMES = ("s3", "gs", "az")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}[A-Za-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_MEMORY = re.compile(r"memory://[A-Za-z0-9._/-]*")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,127}")
_ACCESS_KEY = re.compile(r"A[KS]IA[A-Z0-9]{12,}")  # what AWS's own access keys look like

SettingProblem = tuple[str, str]
"""The key below the tier and what is wrong with it."""


def check_url(url: str) -> str:
    """Return ``url`` if it names a store: ``s3://``, ``gs://`` or ``az://BUCKET[/PREFIX]``, ``memory://NAME``.

    Raises:
        ValueError: it does not; the message says what is missing.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        if _MEMORY.fullmatch(url) is None:
            raise ValueError("write s3://, gs:// or az://BUCKET/PREFIX, or memory://NAME (in this process)")
        return url
    bucket, _, prefix = rest.partition("/")
    if "@" in rest or "?" in rest or "#" in rest:
        raise ValueError("a url holds a bucket and a prefix only; see credentials for keys")
    if not bucket:
        raise ValueError(f"names no bucket: write {scheme}://BUCKET or {scheme}://BUCKET/PREFIX")
    if _BUCKET.fullmatch(bucket) is None:
        raise ValueError("the bucket's name has 3 or more letters, digits, -, . and _")
    parts = prefix.strip("/").split("/")
    if prefix.strip("/") and (_PREFIX.fullmatch(prefix.strip("/")) is None or {".", ".."} & set(parts)):
        raise ValueError("the prefix is made of letters, digits, -, . and _, with single slashes between")
    return url


def split_url(url: str) -> tuple[str, str, str]:
    """Return scheme, bucket and prefix (no slash at either end) of a checked url."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    return scheme, bucket, prefix.strip("/")


def check_endpoint(endpoint: str) -> str:
    """Return ``endpoint`` if it is ``http://`` or ``https://HOST[:PORT]``; raises ``ValueError``."""
    message = "write http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(endpoint)
        bad = parts.port == 0
    except ValueError:
        raise ValueError(message) from None
    if "@" in endpoint:
        raise ValueError("an endpoint holds no user or password; see credentials for keys")
    if bad or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(message)
    return endpoint.rstrip("/")


def check_variable(name: str) -> str:
    """Return ``name`` if it can only be the name of a variable, never a key pasted in its place."""
    if _VARIABLE.fullmatch(name) is None or _ACCESS_KEY.fullmatch(name) is not None:
        raise ValueError("write the NAME of a variable (A-Z, 0-9, _) that holds it, never the key itself")
    return name


def is_plain(endpoint: str | None) -> bool:
    """Say whether an endpoint is plain HTTP."""
    return endpoint is not None and endpoint.startswith("http://")


def is_loopback(endpoint: str | None) -> bool:
    """Say whether an endpoint is this machine (pod) itself."""
    if endpoint is None:
        return False
    host = urlsplit(endpoint).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def setting_problems(
    *,
    scheme: str,
    endpoint: str | None,
    region: str | None,
    account: str | None,
    allow_http: bool,
    access_key: bool,
    secret_key: bool,
    session_token: bool,
    file: bool,
    profile: bool,
) -> Iterator[SettingProblem]:
    """Yield each setting that is missing or has no meaning; the last five say what ``credentials`` has."""
    if scheme == "s3" and region is None and endpoint is None:
        yield "region", "is required: write the bucket's region, or the endpoint of an S3-compatible store"
    if scheme == "az" and account is None:
        yield "account", "is required: write the name of the storage account"
    if scheme != "az" and account is not None:
        yield "account", "has a meaning only with az://"
    if scheme != "s3" and region is not None:
        yield "region", "has a meaning only with s3://"
    if is_plain(endpoint) and not is_loopback(endpoint) and not allow_http:
        yield "endpoint", "is plain HTTP to another machine: write https://, or allow_http: true"
    yield from _credential_problems(scheme, access_key, secret_key, session_token, file, profile)


def _credential_problems(
    scheme: str, access_key: bool, secret_key: bool, session_token: bool, file: bool, profile: bool
) -> Iterator[SettingProblem]:
    if file and (access_key or secret_key or session_token):
        yield "credentials", "write a file or names of variables, not both"
    if profile and not (file and scheme == "s3"):
        yield "credentials.profile", "has a meaning only with s3:// and a credentials file"
    if scheme != "s3" and (access_key or session_token):
        yield "credentials", f"with {scheme}:// only secret_key_variable has a meaning"
    if scheme == "s3" and access_key != secret_key:
        missing = "secret_key_variable" if access_key else "access_key_variable"
        yield f"credentials.{missing}", "is required beside the other one"
    if scheme == "s3" and session_token and not access_key:
        yield "credentials.access_key_variable", "is required beside session_token_variable"
