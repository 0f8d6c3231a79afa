"""Batch numbers that only rise."""

import threading

import pytest

from kvtierd.edges.sequence import SequenceStore


def clock():
    return 1_700_000_000.5


def store(folder, **options):
    return SequenceStore(folder, wall_clock=clock, **{"block": 10, **options})


def take(numbers, count):
    return [numbers.next() for _ in range(count)]


def test_numbers_begin_at_zero_and_go_on_after_a_close(tmp_path):
    first = store(tmp_path)
    assert take(first, 25) == list(range(25))
    first.close()
    assert first.degraded is None
    assert take(store(tmp_path), 3) == [25, 26, 27]


@pytest.mark.parametrize("used", [0, 1, 9, 10, 11, 25])
def test_after_a_crash_of_the_process_numbers_go_on_without_a_hole(tmp_path, used):
    """A reader that has all of them need not ask for anything, nor believe that it lost something."""
    take(store(tmp_path), used)
    assert store(tmp_path).next() == used


@pytest.mark.parametrize("used", [0, 1, 9, 10, 11, 25])
def test_after_a_crash_of_the_machine_numbers_are_above_all_that_were_sent(tmp_path, used):
    sent = take(store(tmp_path), used)
    (tmp_path / "next-sequence-default").write_bytes(bytes(8) + b"another boot".ljust(36))
    assert store(tmp_path).next() > max(sent, default=-1)


@pytest.mark.parametrize("content", [b"", b"x" * 44, b"x" * 5000])
def test_a_page_that_makes_no_sense_is_not_believed(tmp_path, content):
    sent = take(store(tmp_path), 3)
    (tmp_path / "next-sequence-default").write_bytes(content)
    assert store(tmp_path).next() > max(sent)
    assert store(tmp_path).next() == 11, "and is made good"


def test_each_audience_has_its_own_numbers_and_names_are_encoded(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    take(store(folder, names=["a"]), 3)
    assert store(folder, names=["../b"]).next() == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{part}sequence-{name}" for part in ("next-", "") for name in ("..%2Fb", "a")
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("content", ["", "x", "-5", str(1 << 63), "1.5", "\xff"])
def test_a_file_that_makes_no_sense_means_the_wall_clock(tmp_path, content):
    (tmp_path / "sequence-default").write_text(content, "latin-1")
    numbers = store(tmp_path)
    assert numbers.next() == 1_700_000_000_500_000
    assert "sequence-default" in numbers.degraded
    assert store(tmp_path).next() == 1_700_000_000_500_001, "and is made good"


def test_a_state_dir_that_cannot_be_written_means_the_wall_clock_and_a_reason(tmp_path):
    numbers = store(tmp_path / "missing")
    assert take(numbers, 30)[0] == 1_700_000_000_500_000
    assert "missing" in numbers.degraded
    numbers.close()
    assert store(None).next() == 1_700_000_000_500_000
    assert "state_dir" in store(None).degraded


def test_a_known_number_above_the_wall_clock_wins(tmp_path):
    (tmp_path / "sequence-default").write_text(str(1 << 60))
    (tmp_path / "sequence-default.new").mkdir()
    numbers = store(tmp_path)
    assert numbers.degraded
    assert numbers.next() == 1 << 60


def test_extending_ahead_in_a_thread_keeps_numbers_in_order(tmp_path):
    numbers = store(tmp_path, block=64)
    assert not numbers.low
    got = take(numbers, 40)
    assert numbers.low
    thread = threading.Thread(target=numbers.extend)
    thread.start()
    got += take(numbers, 200)
    thread.join()
    assert got == list(range(240))
    assert store(tmp_path, block=64).next() >= 240


def test_numbers_end_below_2_to_63(tmp_path):
    (tmp_path / "sequence-default").write_text(str((1 << 63) - 1))
    numbers = store(tmp_path)
    assert numbers.next() == (1 << 63) - 1
    with pytest.raises(OverflowError):
        numbers.next()
