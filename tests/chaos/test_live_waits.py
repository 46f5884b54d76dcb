"""The clock of live updates: a version has arrived when the store has it, or a newer one."""

from chaos.live_waits import LiveWaits


def test_a_version_waits_until_it_or_a_newer_one_is_written():
    waits = LiveWaits()
    waits.phase = "alone"
    waits.announce({"a": 1}, 10.0)
    waits.announce({"a": 2}, 11.0)
    waits.note("a", 2, 14.0)
    assert waits.p99("alone") == 4.0


def test_what_was_written_first_counts():
    waits = LiveWaits()
    waits.phase = "alone"
    waits.announce({"a": 1}, 10.0)
    waits.note("a", 1, 30.0)
    waits.note("a", 1, 12.0)
    assert waits.p99("alone") == 2.0


def test_an_older_write_does_not_count_and_a_lost_version_waits_for_ever():
    waits = LiveWaits()
    waits.phase = "alone"
    waits.announce({"a": 5}, 10.0)
    waits.note("a", 4, 11.0)
    assert waits.p99("alone") == float("inf")


def test_one_of_a_hundred_may_be_slower():
    waits = LiveWaits()
    waits.phase = "alone"
    for number in range(100):
        waits.announce({f"k{number}": 1}, 0.0)
        waits.note(f"k{number}", 1, 99.0 if number == 7 else 1.0)
    assert waits.p99("alone") == 1.0
    waits.announce({"late": 1}, 0.0)
    waits.note("late", 1, 50.0)
    assert waits.p99("alone") == 50.0


def test_each_phase_counts_its_own_versions_and_none_without_a_phase():
    waits = LiveWaits()
    waits.announce({"a": 1}, 0.0)
    waits.note("a", 1, 100.0)
    waits.phase = "beside"
    waits.announce({"a": 2}, 200.0)
    waits.note("a", 2, 201.0)
    assert waits.p99("beside") == 1.0
    assert waits.p99("alone") is None
