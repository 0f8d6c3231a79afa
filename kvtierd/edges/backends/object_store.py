"""From an object tier's settings to an obstore client; the only module that knows how obstore is set up.

obstore is imported here, and only when such a tier is opened. Secrets are read when a client is made or asks
for them, go to obstore alone, and are kept in no attribute, message or representation.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtierd.config.object_store import is_loopback, is_plain, split_url
from kvtierd.errors import TierError, TierRefused

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Credential

    from kvtierd.config.schema import Credentials, ObjectTier

RUNTIME_THREADS = 4
DEFAULT_REGION = "us-east-1"  # what S3-compatible stores take when they have no regions
MAX_SECRET_FILE = 64 << 10
REREAD = timedelta(minutes=15)  # obstore asks anew five minutes before keys expire: rotated files are seen


def require_obstore(tier: str) -> Any:
    """Return the obstore package.

    Its runtime takes a thread per core unless told otherwise; a few carry a tier's requests.

    Raises:
        TierRefused: it is not installed.
    """
    os.environ.setdefault("TOKIO_WORKER_THREADS", str(min(RUNTIME_THREADS, os.cpu_count() or 1)))
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise TierRefused(tier, "object stores need one more package: pip install kvtierd[object]") from error
    return obstore


def connect(tier: ObjectTier, environ: Mapping[str, str] | None = None) -> ObjectStore:
    """Return a client for the tier's bucket; nothing is sent yet. Keys are relative to the bucket.

    Raises:
        TierRefused: a package, file or variable is missing; names the key of the tier file.
    """
    variables = os.environ if environ is None else environ
    stores = require_obstore(tier.name).store
    scheme, bucket, _ = split_url(tier.url)
    try:
        common: dict[str, Any] = {"client_options": _client_options(tier), "retry_config": _one_try()}
        keys = _Secrets(tier.name, tier.credentials, variables)
        if scheme == "s3":
            return _s3(stores, bucket, tier, keys, common)
        return (_gcs if scheme == "gs" else _azure)(stores, bucket, tier, keys, common)
    except TierError:
        raise
    except Exception as error:  # obstore refuses options with errors whose text may hold them
        raise TierRefused(
            tier.name, f"cannot set up the client of the store ({type(error).__name__})"
        ) from None


def _s3(stores: Any, bucket: str, tier: ObjectTier, keys: _Secrets, common: dict[str, Any]) -> ObjectStore:
    choice = tier.unsigned_payload
    options: dict[str, Any] = {
        "region": tier.region or DEFAULT_REGION,
        "unsigned_payload": choice == "always" or (choice == "auto" and is_loopback(tier.endpoint)),
    }
    if tier.endpoint is not None:
        options["endpoint"] = tier.endpoint
    if (provider := keys.s3_provider()) is not None:
        options["credential_provider"] = provider
    store: ObjectStore = stores.S3Store(bucket, **options, **common)
    return store


def _gcs(stores: Any, bucket: str, tier: ObjectTier, keys: _Secrets, common: dict[str, Any]) -> ObjectStore:
    options: dict[str, Any] = {}
    if tier.endpoint is not None:
        options["base_url"] = tier.endpoint
    if (secret := keys.single()) is not None:
        options["service_account_key"] = secret
    store: ObjectStore = stores.GCSStore(bucket, **options, **common)
    return store


def _azure(stores: Any, bucket: str, tier: ObjectTier, keys: _Secrets, common: dict[str, Any]) -> ObjectStore:
    options: dict[str, Any] = {"account_name": tier.account}
    if tier.endpoint is not None:
        options["endpoint"] = tier.endpoint
    if (secret := keys.single()) is not None:
        options["account_key"] = secret.strip()
    store: ObjectStore = stores.AzureStore(bucket, **options, **common)
    return store


def _client_options(tier: ObjectTier) -> ClientConfig:
    options: ClientConfig = {
        "allow_http": is_plain(tier.endpoint),
        "connect_timeout": timedelta(seconds=tier.connect_timeout),
        "timeout": timedelta(seconds=tier.request_timeout),
    }
    if tier.ca_bundle is not None:
        options["root_certificate"] = _read(tier.name, "ca_bundle", tier.ca_bundle, 4 << 20)
    return options


def _one_try() -> RetryConfig:
    """Tries are counted in ``object_patience``."""
    moment = timedelta(milliseconds=1)
    return {
        "max_retries": 0,
        "retry_timeout": moment,
        "backoff": {"init_backoff": moment, "max_backoff": moment, "base": 2},
    }


def _read(tier: str, key: str, path: Path, limit: int) -> bytes:
    """Return a small file's content; raises :class:`TierRefused` that names the key."""
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise TierRefused(tier, f"{key}: cannot read {path}: {error.strerror}") from None
    if not content or len(content) > limit:
        raise TierRefused(tier, f"{key}: {path} is empty or larger than {limit} bytes")
    return content


class _Secrets:
    """Reads keys from where the settings say; keeps none."""

    def __init__(self, tier: str, settings: Credentials, environ: Mapping[str, str]) -> None:
        self._tier = tier
        self._settings = settings
        self._environ = environ

    def single(self) -> str | None:
        """Return the one secret of gs or az; None means the provider's own chain."""
        if (path := self._settings.file) is not None:
            return _read(self._tier, "credentials.file", path, MAX_SECRET_FILE).decode(errors="replace")
        return self._variable("secret_key_variable", self._settings.secret_key_variable)

    def s3_provider(self) -> Callable[[], S3Credential] | None:
        """Return what gives obstore keys when it needs some; None means the provider's own chain.

        The first reading is done here, so that a missing file is told at start.
        """
        if self._settings.file is None and self._settings.access_key_variable is None:
            return None
        self._s3_keys()
        return self._provide

    def _provide(self) -> S3Credential:
        """Called by obstore; the mark lets ``object_errors`` find the reason in obstore's text."""
        try:
            access, secret, token = self._s3_keys()
        except TierError as error:
            raise ValueError(f"[credentials] {error}") from None
        expires = datetime.now(UTC) + REREAD if self._settings.file is not None else None
        return {"access_key_id": access, "secret_access_key": secret, "token": token, "expires_at": expires}

    def _s3_keys(self) -> tuple[str, str, str | None]:
        settings = self._settings
        if settings.file is not None:
            return self._from_file(settings.file, settings.profile or "default")
        access = self._variable("access_key_variable", settings.access_key_variable)
        secret = self._variable("secret_key_variable", settings.secret_key_variable)
        assert access is not None, "checked with the tier file"
        assert secret is not None
        return access, secret, self._variable("session_token_variable", settings.session_token_variable)

    def _from_file(self, path: Path, profile: str) -> tuple[str, str, str | None]:
        text = _read(self._tier, "credentials.file", path, MAX_SECRET_FILE).decode(errors="replace")
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(text)
            section = parser[profile]
            return (
                section["aws_access_key_id"],
                section["aws_secret_access_key"],
                section.get("aws_session_token"),
            )
        except (configparser.Error, KeyError):  # their text quotes the file's lines
            message = (
                f"credentials.file: {path} has no aws_access_key_id and aws_secret_access_key in [{profile}]"
            )
            raise TierRefused(self._tier, message) from None

    def _variable(self, key: str, name: str | None) -> str | None:
        if name is None:
            return None
        value = self._environ.get(name, "")
        if not value:
            raise TierRefused(self._tier, f"credentials.{key}: the variable {name} is not set")
        return value
