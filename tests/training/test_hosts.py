"""More than one host, and what happens when one is lost. Hosts are network namespaces, which only root may make."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import corpora
from tests.runs import same

from splitstep.tables import toml

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSTEP_CACHE", str(tmp_path / "cache"))


def recipe(tmp_path, **training) -> list[str]:
    settings = {"threads": 1, "save_every": 2, "log_every": 1, "timeout": 20, **training}
    tables = corpora.language_recipe(
        corpora.articles(tmp_path / "data"), model={"dropout": 0.2}, training={"evaluate_every": 4, **settings}
    )
    (tmp_path / "recipe.toml").write_text(toml(tables))
    return ["-m", "splitstep", "train", str(tmp_path / "recipe.toml"), "--out"]


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *words]


def start(command: list[str], log: Path, **environment: str) -> subprocess.Popen:
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env={**os.environ, **environment})


def undisturbed(tmp_path, asked) -> Path:
    command = [*torchrun("--nproc-per-node=2", "--standalone"), *asked, str(tmp_path / "whole")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert answer.returncode == 0, answer.stderr
    return tmp_path / "whole"


@pytest.fixture
def hosts():
    """Two network namespaces with a cable between them: their names and the devices at its ends."""
    if os.getuid() != 0 or subprocess.run(["ip", "netns", "list"], capture_output=True).returncode:
        pytest.skip("network namespaces need root and the command ip")
    mark = os.getpid() % 10_000
    names, devices = [f"ss{mark}{side}" for side in "ab"], [f"v{mark}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for number, (name, device) in enumerate(zip(names, devices, strict=True), start=1):
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, devices
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def on_both(tmp_path, hosts, asked, run: Path) -> list[subprocess.Popen]:
    names, devices = hosts
    started = []
    for rank, (name, device) in enumerate(zip(names, devices, strict=True)):
        words = torchrun("--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=10.77.0.1")
        command = ["ip", "netns", "exec", name, *words, "--master-port=29511", *asked, str(run)]
        started.append(start(command, tmp_path / f"host{rank}.log", GLOO_SOCKET_IFNAME=device))
    return started


def test_two_hosts_end_where_one_does(tmp_path, hosts):
    asked = recipe(tmp_path)
    whole = undisturbed(tmp_path, asked)
    for process in on_both(tmp_path, hosts, asked, tmp_path / "run"):
        assert process.wait(200) == 0, (tmp_path / "host0.log").read_text()
    same(whole, tmp_path / "run")


def test_a_cut_link_ends_every_process_and_the_same_command_goes_on(tmp_path, hosts):
    asked = recipe(tmp_path, updates=2000, save_every=50, evaluate_every=2000)
    run = tmp_path / "run"
    started = on_both(tmp_path, hosts, asked, run)
    until = time.monotonic() + 100
    while not (run / "checkpoints" / "checkpoint-50" / "complete.json").exists():
        assert time.monotonic() < until, (tmp_path / "host0.log").read_text()
        time.sleep(0.05)
    subprocess.run(["ip", "-n", hosts[0][1], "link", "set", hosts[1][1], "down"], check=True)
    assert [process.wait(120) for process in started] == [1, 1]
    said = (tmp_path / "host0.log").read_text() + (tmp_path / "host1.log").read_text()
    assert "the other processes no longer answer" in said
    subprocess.run(["ip", "-n", hosts[0][1], "link", "set", hosts[1][1], "up"], check=True)
    shorter = [*asked[:3], asked[3], "training.updates=60", asked[4]]
    for process in on_both(tmp_path, hosts, shorter, run):
        assert process.wait(200) == 0, (tmp_path / "host0.log").read_text()


def test_a_killed_worker_is_started_again_and_ends_the_same(tmp_path):
    asked = recipe(tmp_path, updates=60)
    whole, run = undisturbed(tmp_path, asked), tmp_path / "run"
    command = [*torchrun("--nproc-per-node=2", "--standalone", "--max-restarts=1"), *asked, str(run)]
    process = start(command, tmp_path / "log")
    until = time.monotonic() + 100
    while not (run / "checkpoints" / "checkpoint-10" / "complete.json").exists():
        assert time.monotonic() < until, (tmp_path / "log").read_text()
        time.sleep(0.01)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert process.wait(200) == 0, (tmp_path / "log").read_text()
    assert "going on from update" in (tmp_path / "log").read_text()
    same(whole, run)
