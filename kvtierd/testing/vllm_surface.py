"""What of vLLM the glue stands on, read out of vLLM's source without importing it.

``python -m kvtierd.testing.vllm_surface WHEEL_OR_FOLDER...`` prints the table of those versions:
``{symbol: {signature: [versions]}}``; a version in which a symbol is missing is in none of its lists. A
symbol is ``module:name`` or ``module:Class.member``; signatures are source text without annotations.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Read = Callable[[str], str | None]
Table = dict[str, dict[str, list[str]]]

_CONNECTORS = "vllm/distributed/kv_transfer/kv_connector/v1"
_OFFLOADING = f"{_CONNECTORS}/offloading"

MEMBERS: dict[str, tuple[str, ...]] = {
    # What KvtierdConnector is called with, overrides and reaches into.
    f"{_CONNECTORS}/offloading_connector:OffloadingConnector": (
        "__init__",
        "on_new_request",
        "update_connector_output",
        "build_connector_meta",
        "build_connector_worker_meta",
        "handle_preemptions",
        "request_finished",
        "request_finished_all_groups",
        "connector_scheduler",
        "connector_worker",
    ),
    f"{_CONNECTORS}/base:KVConnectorBase_V1": (
        "bind_connector_metadata",
        "get_block_ids_with_load_errors",
        "get_transfer_results",
    ),
    f"{_OFFLOADING}/scheduler:OffloadingConnectorScheduler": ("manager", "_current_batch_jobs_to_flush"),
    f"{_OFFLOADING}/worker:OffloadingConnectorWorker": ("spec", "worker", "_load_jobs", "get_finished"),
    f"{_OFFLOADING}/common:OffloadingConnectorMetadata": ("load_jobs", "store_jobs", "jobs_to_flush"),
    f"{_OFFLOADING}/common:OffloadingWorkerMetadata": ("completed_jobs", "transfer_stats", "aggregate"),
    # The interfaces that the glue implements.
    "vllm/v1/kv_offload/base:OffloadingSpec": (
        "__init__",
        "build_metric_definitions",
        "get_manager",
        "get_worker",
        "extra_config",
        "blocks_per_chunk",
    ),
    "vllm/v1/kv_offload/base:OffloadingManager": (
        "lookup",
        "get_load_source",
        "prepare_load",
        "touch",
        "complete_load",
        "prepare_store",
        "complete_store",
        "on_new_request",
        "on_request_finished",
        "take_events",
        "on_schedule_end",
        "has_pending_work",
        "reset_cache",
        "on_reset_flushed",
        "get_stats",
        "shutdown",
    ),
    "vllm/v1/kv_offload/base:OffloadingWorker": (
        "submit_store",
        "submit_load",
        "get_finished",
        "wait",
        "shutdown",
    ),
    # What travels over them.
    "vllm/v1/kv_offload/base:ReqContext": ("req_id", "kv_transfer_params"),
    "vllm/v1/kv_offload/base:LookupResult": ("MISS", "HIT", "HIT_PENDING", "RETRY"),
    "vllm/v1/kv_offload/base:PrepareStoreOutput": ("keys_to_store", "store_spec", "evicted_keys"),
    "vllm/v1/kv_offload/base:RequestOffloadingContext": ("policy",),
    "vllm/v1/kv_offload/base:ScheduleEndContext": ("new_req_ids", "preempted_req_ids"),
    "vllm/v1/kv_offload/base:GPULoadStoreSpec": ("__init__", "group_sizes", "block_indices"),
    "vllm/v1/kv_offload/base:BlockIDsLoadStoreSpec": ("block_ids",),
    "vllm/v1/kv_offload/base:CanonicalKVCaches": ("tensors", "group_data_refs"),
    "vllm/v1/kv_offload/base:CanonicalKVCacheTensor": ("tensor", "page_size_bytes"),
    "vllm/v1/kv_offload/base:CanonicalKVCacheRef": ("tensor_idx", "page_size_bytes"),
    "vllm/v1/kv_offload/base:TransferResult": ("job_id", "success", "transfer_size", "transfer_time"),
    # What the engine's configuration is read from.
    "vllm/v1/kv_offload/config:OffloadingConfig": (
        "groups",
        "worker_kv_bytes_per_block",
        "extra_config",
        "engine_id",
        "model",
        "cache",
        "parallel",
        "canonical_layout",
        "kv_cache_layout",
    ),
    "vllm/v1/kv_offload/config:OffloadingGroupConfig": ("tokens_per_block", "group_id"),
    "vllm/v1/kv_offload/config:OffloadingModelConfig": ("name", "dtype"),
    "vllm/v1/kv_offload/config:OffloadingCacheConfig": ("tokens_per_hash", "blocks_per_chunk"),
    "vllm/v1/kv_offload/config:OffloadingParallelConfig": (
        "rank",
        "world_size",
        "tp_size",
        "pp_size",
        "pcp_size",
        "dcp_size",
        "data_parallel_index",
    ),
    "vllm/v1/kv_cache_interface:KVCacheConfig": ("kv_cache_groups",),
    "vllm/v1/kv_cache_interface:KVCacheGroupSpec": ("kv_cache_spec", "layer_names"),
    "vllm/config/kv_transfer:KVTransferConfig": ("kv_connector_extra_config", "kv_load_failure_policy"),
    "vllm/config/cache:CacheConfig": ("prefix_caching_hash_algo",),
    "vllm/config/attention:AttentionConfig": ("backend",),
    "vllm/config/model:ModelConfig": ("revision", "quantization", "hf_overrides", "dtype"),
    "vllm/v1/request:Request": (
        "request_id",
        "block_hashes",
        "all_token_ids",
        "lora_request",
        "cache_salt",
        "kv_transfer_params",
    ),
    "vllm/lora/request:LoRARequest": ("adapter_id", "name"),
    "vllm/v1/outputs:KVConnectorOutput": ("kv_connector_worker_meta", "invalid_block_ids", "failed_recving"),
}
"""Members of classes: methods by signature, everything else by being there."""

NAMES: tuple[str, ...] = (
    f"{_CONNECTORS}/base:KVConnectorTransferResults",
    f"{_CONNECTORS}/base:KVConnectorRole",
    "vllm/v1/core/kv_cache_utils:generate_block_hash_extra_keys",
    "vllm/v1/core/kv_cache_utils:maybe_convert_block_hash",
    "vllm/v1/core/kv_cache_utils:to_event_extra_keys",
    "vllm/v1/core/kv_cache_utils:DEFAULT_NONE_HASH_SEED",
    "vllm/v1/kv_cache_interface:FullAttentionSpec",
    "vllm/v1/kv_cache_interface:get_kv_cache_spec_kind",
    "vllm/v1/kv_cache_interface:get_kv_cache_spec_sliding_window",
    "vllm/v1/metrics/cache_hit_source:CacheHitSource",
    "vllm/v1/kv_offload/base:LoadStoreSpec",
    "vllm/v1/kv_offload/base:OffloadKey",
    "vllm/v1/kv_offload/base:OffloadingCounterMetadata",
    "vllm/v1/kv_offload/base:OffloadingGaugeMetadata",
    f"{_OFFLOADING}/metrics:OffloadingConnectorStats",
    "vllm/_custom_ops:swap_blocks_batch",
)
"""Functions by signature, other names by being there."""


def symbols() -> Iterator[str]:
    """Every symbol of the surface, in a fixed order."""
    yield from NAMES
    for place, members in MEMBERS.items():
        yield place
        yield from (f"{place}.{member}" for member in members)


def surface(read: Read) -> dict[str, str]:
    """Return the signature of each symbol that one version has; ``read`` gives a source file by its path."""
    trees: dict[str, dict[str, ast.AST]] = {}
    found: dict[str, str] = {}
    for symbol in symbols():
        module, _, path = symbol.partition(":")
        if module not in trees:
            trees[module] = _definitions(ast.parse(read(f"{module}.py") or ""))
        name, _, member = path.partition(".")
        node = trees[module].get(name)
        if node is not None and member:
            node = _members(node, trees[module]).get(member)
        if node is not None:
            found[symbol] = _signature(node)
    return found


def moved(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    """Name every difference of two versions' surfaces."""
    return [
        f"{symbol}: {expected.get(symbol, 'was not there')} -> {actual.get(symbol, 'is gone')}"
        for symbol in symbols()
        if expected.get(symbol) != actual.get(symbol)
    ]


def of_version(table: Table, version: str) -> dict[str, str]:
    """Return one version's surface out of a table."""
    return {
        symbol: signature
        for symbol, signatures in table.items()
        for signature, versions in signatures.items()
        if version in versions
    }


def reader(package: Path) -> tuple[str, Read]:
    """Open a wheel or a folder that has ``vllm`` in it; return its version and how to read its files.

    Raises:
        ValueError: it has no vLLM, or one without a version.
    """
    if package.is_dir():

        def read(path: str) -> str | None:
            file = package / path
            return file.read_text(encoding="utf-8") if file.exists() else None
    else:
        if not package.exists():
            raise ValueError(f"{package} does not exist")
        archive = zipfile.ZipFile(package)
        inside = set(archive.namelist())

        def read(path: str) -> str | None:
            return archive.read(path).decode() if path in inside else None

    version = re.search(r"^__version__ = version = '([^'+]+)", read("vllm/_version.py") or "", re.MULTILINE)
    if version is None:
        raise ValueError(f"{package} has no vllm/_version.py that names a version")
    return version[1], read


def table_of(packages: Sequence[Path]) -> Table:
    """Return the table of several versions."""
    table: Table = {symbol: {} for symbol in symbols()}
    for version, read in map(reader, packages):
        for symbol, signature in surface(read).items():
            table[symbol].setdefault(signature, []).append(version)
    return table


def _definitions(tree: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({target.id: node for target in targets if isinstance(target, ast.Name)})
    return found


def _members(node: ast.AST, module: dict[str, ast.AST]) -> dict[str, ast.AST]:
    """Return what a class has: methods, class attributes, what is set on ``self``; bases first."""
    if not isinstance(node, ast.ClassDef):
        return {}
    found: dict[str, ast.AST] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in module:
            found |= _members(module[base.id], module)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            found[inner.attr] = inner
    return found | _definitions(node)


def _signature(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(map(ast.unparse, node.bases))})"
    if not isinstance(node, ast.FunctionDef):
        return "attribute"
    kinds = {ast.unparse(decorator) for decorator in node.decorator_list}
    if kinds & {"property", "cached_property"}:
        return "attribute"
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for rest in (arguments.vararg, arguments.kwarg):
        if rest is not None:
            rest.annotation = None
    return f"{'abstract' if 'abstractmethod' in kinds else 'def'}({ast.unparse(arguments)})"


def main() -> None:
    """Print the table of the packages named on the command line."""
    lines = [f"{json.dumps(s)}: {json.dumps(v)}" for s, v in table_of(list(map(Path, sys.argv[1:]))).items()]
    print("{", ",\n".join(lines), "}", sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
