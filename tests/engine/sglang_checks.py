"""Checks of the SGLang backend with SGLang's own factory, host pools and controller code; see test_sglang.py.

By hand: ``PYTHONPATH=.:.venvs/sglang .venvs/vllm/bin/python tests/engine/sglang_checks.py FOLDER PYTHON``.
Prints one JSON object, name to failure; runs the checks of ``sglang_pool_checks.py`` too.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import sglang_pool_checks
import torch
from sglang_rig import LAYOUTS, PAGE, Controller, backend, host_pool, names_of, pages, same

from kvtierd.engines.sglang.pages import to_event_hash, to_key
from kvtierd.engines.sglang.settings import Settings
from kvtierd.errors import ConfigError
from kvtierd.testing.clock import wait_for
from kvtierd.testing.daemon_rig import DaemonRig


def check_pages_of_every_layout_come_back_as_they_were(rig):
    for layout in LAYOUTS:
        for v1 in (1, 0):
            pool, names = host_pool(layout), names_of(12, f"{layout}{v1}")
            made = backend(rig, pool, v1=v1)
            controller = Controller(made, pool, v1=bool(v1))
            assert made.batch_exists(names) == 0
            assert controller.fetch(names, 20) == 0
            assert controller.backup(names) == 12 * PAGE
            assert made.batch_exists(names) == 12
            before = pages(pool, 0, 12)
            pool.kv_buffer[...].zero_()
            assert controller.fetch(names, 20) == 12
            assert same(pages(pool, 20, 12), before), (layout, v1)
            assert not any(page.any() for page in pages(pool, 0, 12))
            assert controller.backup(names) == 12 * PAGE  # again: they are there
            made.clear()
            assert made.batch_exists(names) == 0
            made.close()


def check_the_loads_are_real(rig):
    pool, names = host_pool(), names_of(3)
    made = backend(rig, pool)
    controller = Controller(made, pool)
    controller.backup(names)
    with made._main.writer.load([to_key(name) for name in names]) as got:
        for view in got.views():
            view[:] = bytes(len(view))
    assert controller.fetch(names, 20) == 3
    assert not any(page.any() for page in pages(pool, 20, 3))
    made.clear()
    made.close()


def check_pages_that_are_only_on_disk_come_back(rig):
    pool, names = host_pool(), names_of(8, "disk")
    made = backend(rig, pool)
    controller = Controller(made, pool)
    controller.backup(names)
    keys = [to_key(name) for name in names]
    on_disk = lambda: {e.key for e in made._main.writer.inventory("disk")} >= set(keys)  # noqa: E731
    wait_for(on_disk, "the pages to be on disk")
    made._main.writer.evict(keys, tiers=["cpu"])
    assert made.batch_exists(names) == 8
    before = pages(pool, 0, 8)
    assert controller.fetch(names, 20) == 8
    assert same(pages(pool, 20, 8), before)
    rig.agree()
    made.clear()
    made.close()


def check_only_the_leading_run_counts(rig):
    pool, names = host_pool(), names_of(6, "gap")
    made = backend(rig, pool)
    controller = Controller(made, pool)
    controller.backup(names[:2])
    controller.backup(names[3:], first=3, prefix=names[:3])
    assert made.batch_exists(names) == 2
    assert controller.fetch(names, 20) == 2
    assert made.exists(names[4])
    assert not made.exists(names[2])
    made.clear()
    made.close()


def check_ranks_and_tenants_and_models_are_apart_and_equal_ranks_share(rig):
    pool, names = host_pool(), names_of(2, "apart")
    mine = backend(rig, pool)
    Controller(mine, pool).backup(names)
    others = [
        backend(rig, pool, rank=1),
        backend(rig, pool, kvtierd_tenant="b"),
        backend(rig, pool, kvtierd_weights_id="b"),
        backend(rig, pool, model="other"),
        backend(rig, host_pool("page_first")),
    ]
    assert [other.batch_exists(names) for other in others] == [0] * 5
    assert backend(rig, pool).batch_exists(names) == 2
    first, second = backend(rig, pool, mla=True), backend(rig, pool, mla=True, rank=1)
    Controller(first, pool).backup(names)
    assert second.batch_exists(names) == 2
    rig.agree()
    mine.clear()
    first.clear()
    for made in (mine, first, second, *others):
        made.close()


def check_events_name_each_page_and_the_one_before(rig):
    pool, names = host_pool(), names_of(4, "events")
    made = backend(rig, pool)
    controller = Controller(made, pool)
    rig.settle()
    rig.router.batches.clear()
    controller.backup(names[:2])
    controller.backup(names[2:], first=2, prefix=names[:2])
    rig.agree()
    stored = [e for e in rig.router.events if getattr(e, "token_ids", None) is not None and e.medium == "CPU"]
    hashes = [to_event_hash(name) for name in names]
    assert [list(e.block_hashes) for e in stored] == [[h] for h in hashes]
    assert [e.parent_block_hash for e in stored] == [None, *hashes[:-1]]
    assert [(list(e.token_ids), e.block_size) for e in stored] == [([], 0)] * 4
    made.clear()
    made.close()


def check_an_engine_outlives_its_daemon_and_finds_the_next_one(rig):
    pool, names = host_pool(), names_of(4, "killed")
    made = backend(rig, pool, kvtierd_deadline=0.3)
    controller = Controller(made, pool)
    controller.backup(names)
    rig.daemon.kill()
    assert made.batch_exists(names) == 0
    assert controller.fetch(names, 20) == 0
    assert controller.backup(names_of(2, "away")) == 0
    rig.router.close()
    rig.router = type(rig.router)()
    rig.start()
    wait_for(lambda: controller.backup(names_of(2, "back")) == 2 * PAGE, "the way back")
    before = pages(pool, 0, 2)
    wait_for(lambda: controller.fetch(names_of(2, "back"), 20) == 2, "the way back of the reader")
    assert same(pages(pool, 20, 2), before)
    made.clear()
    made.close()


def check_single_pages_come_and_go(rig):
    pool, (name,) = host_pool(), names_of(1, "single")
    made = backend(rig, pool)
    page = pool.get_data_page(0).clone()
    assert made.get(name) is None
    assert made.set(name, page)
    assert torch.equal(made.get(name), page)
    into = torch.zeros_like(page)
    assert made.get(name, into) is into
    assert torch.equal(into, page)
    made.clear()
    made.close()


def check_wrong_settings_are_refused_with_their_name(rig):
    for extra, said in (
        ({}, "kvtierd_socket is missing"),
        ({"kvtierd_socket": 3}, "kvtierd_socket"),
        ({"kvtierd_socket": "s", "kvtierd_sokket": 1}, "kvtierd_sokket"),
        ({"kvtierd_socket": "s", "kvtierd_deadline": 0}, "kvtierd_deadline"),
        ({"kvtierd_socket": "s", "kvtierd_tenant": 7}, "kvtierd_tenant"),
    ):
        refused = ""
        try:
            Settings.of(extra)
        except ConfigError as error:
            refused = str(error)
        assert said in refused, extra


def main():
    folder, python = sys.argv[1:]
    rig, results = DaemonRig(Path(folder), slots=4096, python=python).start(), {}
    try:
        for name, check in (globals() | vars(sglang_pool_checks)).items():
            if name.startswith("check_"):
                try:
                    check(rig)
                    results[name] = None
                except Exception:
                    results[name] = traceback.format_exc()
    finally:
        rig.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
