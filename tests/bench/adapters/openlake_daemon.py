"""OpenLake's daemon for memory, through its own client; the argument is the folder that has the package."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from pathlib import Path

import lines  # first: it takes standard output
import openlake_client
import ports
from openlake_client import Client

BATCH = 16
SLOT_HEADER = 54
"""Bytes that its own connector adds to a block."""


CONFIG = """\
self_id = 0
mode = "kv"
transport = "h2"
rpc_addr = "127.0.0.1:{rpc}"
kv_agents = ["127.0.0.1:{rpc}"]
s3_addr = "127.0.0.1:{s3}"
region = "us-east-1"
data_dirs = []
set_drive_count = 1
default_parity_count = 1
[[credentials]]
access_key = "bench"
secret_key = "bench"
[[nodes]]
id = 0
rpc_addr = "127.0.0.1:{rpc}"
disk_count = 0
[kv_slab]
capacity_gb = {capacity}
reserve_ttl_secs = 60
"""


class Daemon:
    def open(self, pool_bytes: int, block_bytes: int, layers: int, prompt: int) -> list[int]:
        self.folder = tempfile.TemporaryDirectory(prefix="openlake-")
        self.process, self.address = self._start(max(1, pool_bytes >> 30))
        self.memory = lines.Memory(block_bytes // layers // 2, 2 * layers * BATCH)
        self.parts = 2 * layers
        self.block_bytes = block_bytes
        self.client = self._client(2048)
        self.stores = 0
        self.prompt = [self._key(0, number) for number in range(prompt)]
        for start in range(0, (pool_bytes // block_bytes) if layers > 1 else 0, BATCH):
            self._put([self._key(-1, start + i) for i in range(BATCH)])  # its slab is not touched before
        for start in range(0, prompt, BATCH):
            self._put(self.prompt[start : start + BATCH])
        return [self.process.pid]

    def _start(self, capacity: int) -> tuple[subprocess.Popen[bytes], str]:
        program = Path(openlake_client.__file__).parent / "openlaked"
        program.chmod(0o755)
        rpc, s3 = ports.free_ports(2)
        config = Path(self.folder.name) / "openlake.toml"
        config.write_text(CONFIG.format(rpc=rpc, s3=s3, capacity=capacity))
        process = subprocess.Popen([program, "--config", config], stdin=subprocess.DEVNULL)
        ports.wait_for_port(process, rpc)
        return process, f"127.0.0.1:{rpc}"

    def _client(self, number: int) -> Client:
        client = Client(device="local", client_id=number)
        client.register_memory(self.memory.address, 2 * self.memory.bytes)
        client.attach(self.address, 0, self.block_bytes + SLOT_HEADER)
        return client

    def grow(self, blocks: int, at_once: int) -> None:
        """Store blocks, ``at_once`` in a call."""
        for number in range(blocks // at_once):
            self._put([self._key(-2 - number, i) for i in range(at_once)])

    def pins(self, pin: bool) -> bool:
        """Say whether it has lookups of this kind."""
        return not pin

    def lookup(self, times: int, pin: bool) -> list[float]:
        return [lines.timed(lambda: self._find(self.client)) for _ in range(times)]

    def lookups(self, seconds: float, lanes: int, pin: bool) -> float:
        start = time.perf_counter()
        counts = [0] * lanes

        def lane(number: int) -> None:
            client = self._client(2049 + number)
            while time.perf_counter() < start + seconds:
                self._find(client)
                counts[number] += 1
            client.close()

        threads = [threading.Thread(target=lane, args=(number,)) for number in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - start)

    def store(self, times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            self.stores += 1
            self.last = [self._key(self.stores, number) for number in range(BATCH)]
            seconds.append(lines.timed(lambda: self._put(self.last)))
        return seconds

    def load(self, times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            seconds.append(lines.timed(self._get))
            if self.memory.wrong():
                raise RuntimeError("a load brought other bytes than were stored")
        return seconds

    def wipe(self) -> None:
        """It evicts by itself when slots are needed; nothing deletes single keys."""

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(ports.DEADLINE)
        for left in Path("/dev/shm").glob(f"openlake_kv_{self.process.pid}_*"):
            left.unlink()  # it does not do that itself
        self.folder.cleanup()

    @staticmethod
    def _key(round_number: int, number: int) -> bytes:
        return lines.key(round_number, number) + bytes(22)

    def _addresses(self, count: int, base: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return where the parts of blocks are, as its connector passes them: a list for each block."""
        size = self.memory.block_bytes
        places = [
            [base + (part * BATCH + number % BATCH) * size for part in range(self.parts)]
            for number in range(count)
        ]
        return places, [[size] * self.parts] * count

    def _put(self, keys: list[bytes]) -> None:
        if any(self.client.put_batch(keys, *self._addresses(len(keys), self.memory.address))):
            raise RuntimeError("openlaked refused blocks")

    def _get(self) -> None:
        base = self.memory.address + self.memory.bytes
        if any(self.client.get_batch(self.last, *self._addresses(BATCH, base))):
            raise RuntimeError("openlaked did not find blocks")

    def _find(self, client: Client) -> None:
        if sum(client.batch_is_exist(self.prompt)) != len(self.prompt):
            raise RuntimeError("the prompt was not found whole")


if __name__ == "__main__":
    lines.serve(Daemon())
