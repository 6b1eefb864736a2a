"""D1: simulated hosts: whole workers on a simulated disk and device, in orders and with faults that a seed chooses.

A bounded part of what ``make simulate`` runs.
"""

import gc
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import sim_run
import simulate
from sim_planted import PLANTED, Planted

HELPERS = Path(simulate.__file__).parent
BATCHES, BATCH = 6, 25


@cache
def batch(number: int) -> simulate.Totals:
    return simulate.run_seeds(range(number * BATCH, (number + 1) * BATCH))


@pytest.mark.parametrize("number", range(BATCHES))
def test_D1_simulated_hosts_break_no_rule(number: int) -> None:
    totals = batch(number)
    assert not totals.broken, f"python tests/helpers/simulate.py --seed {totals.broken[0][0]} runs it again"
    assert totals.steps > BATCH * 100


def test_D1_faults_of_every_family_are_injected_and_processes_are_cut_at_many_calls() -> None:
    totals = simulate.Totals()
    for number in range(BATCHES):
        totals.join(batch(number))
    assert {"ENOSPC", "EIO", "EMFILE", "EINTR", "slow disk", "worker killed", "power lost"} <= set(totals.injected)
    assert {"copy failed", "slow copy", "out of device memory"} <= set(totals.injected)
    assert len(totals.cuts) > 5
    assert {"LoadedModel", "Attachment", "HostWeightsError", "CancelledError", "killed"} <= set(totals.ends)


def test_D1_a_seed_is_the_same_run_each_time_and_in_every_process() -> None:
    with simulate.quiet():
        first, again = (sim_run.simulate(17, trace=True) for _ in range(2))
    assert first.trace == again.trace
    assert first.digest == again.digest
    # Another salt for the hashes of strings, so that no order is left to chance.
    salt = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, str(HELPERS / "simulate.py"), "--seed", "17"]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
    )
    assert f"{first.steps} steps, trace {first.digest:08x}" in ran.stdout


@pytest.mark.parametrize("seed", [13, 21, 139])
def test_D1_what_killed_processes_leave_goes_while_their_disk_is_there(seed: int) -> None:
    with simulate.quiet():
        sim_run.simulate(seed)
    gc.collect()  # a descriptor of the simulated disk that is closed on the real one is an error of this test


def test_D1_another_seed_is_another_run() -> None:
    with simulate.quiet():
        digests = {sim_run.simulate(seed).digest for seed in range(5)}
    assert len(digests) == 5


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_D1_the_simulation_finds_a_planted_bug(bug: Planted) -> None:
    found = simulate.find(bug)
    assert found.rule is not None, f"{bug.name} was not found in {found.seeds} seeds"
