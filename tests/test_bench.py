"""Benchmarks: ratios to the fastest reference, and who could not take part is named."""

import time

import pytest
import torch

from splitstep.bench import Missing, peak_bytes, race, startup


def _busy(seconds):
    def run():
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

    return run


def test_a_race_compares_with_the_fastest_reference_and_names_who_is_missing():
    runs = {
        "slow": _busy(0.04),
        "fast": _busy(0.01),
        "ours": _busy(0.02),
        "absent": Missing("nothing"),
    }
    found = {
        case.contestant: case
        for case in race(
            "sleep", runs, reference=("slow", "fast", "absent"), precision="float32", repeats=3, flops={"ours": 1e6}
        )
    }
    assert [*found] == [*runs]
    assert found["fast"].ratio == 1
    assert found["slow"].ratio < found["ours"].ratio < 1
    assert found["absent"].missing == "nothing"
    assert found["absent"].median_seconds is None
    assert 0 < found["ours"].share_of_peak < 1
    assert found["fast"].share_of_peak is None


def test_peak_memory_is_what_was_held_at_a_time():
    def run():
        first = torch.empty(1000, 1000)
        second = first + 1
        del first
        third = second * 2
        return second + third

    assert peak_bytes(run) == pytest.approx(3 * 4_000_000, rel=0.01)


def test_start_up_counts_what_other_processes_do(monkeypatch):
    busy = "import time\nwhile time.process_time() < {}: pass"
    monkeypatch.setattr(startup, "READY", {"soon": ["-c", busy.format(0.1)]})
    monkeypatch.setattr(startup, "PEER", {"late": ["-c", busy.format(0.4)]})
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the processor's clock
    try:
        found = {case.contestant: case for case in startup.cases(repeats=1)}
    finally:
        torch.set_num_threads(before)
    assert found["late"].median_seconds >= 0.39
    assert found["soon"].ratio > 1
