"""The files in deploy/, run: three replicas behind a real nginx, killed and restarted under load. Loopback only."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitfit import load_base
from bitfit.cli.options import parser
from support import make_folder

pytest.importorskip("starlette", reason="needs the serve extra")

from bitfit.serve.client import Client
from churn import Churn
from service import CHANGE, until

DEPLOY = Path(__file__).parents[1] / "deploy"
NGINX = shutil.which("nginx", path=os.environ["PATH"] + os.pathsep + "/usr/sbin")
LAG = 5.0  # seconds after which every replica has seen a change: --watch is 1
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


def exec_start(unit: str) -> list[str]:
    line = re.search(r"^ExecStart=(.*)$", (DEPLOY / unit).read_text(), re.M)
    assert line is not None
    return shlex.split(line[1])


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


class Supervisor:
    """What systemd does for `Restart=always`: runs a command again whenever it ends. Its pid is in a file."""

    def __init__(self, command: list[str], pid_file: Path) -> None:
        self.command, self.pid_file = command, pid_file
        self.starts = 0
        self.over = False
        self.process: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BITFIT_CHANGE_TOKEN": CHANGE}
        environment["PYTHONPATH"] = str(DEPLOY.parent / "src")
        while not self.over:
            with self.pid_file.with_suffix(".log").open("ab") as log:
                self.process = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log)
            self.pid_file.write_text(str(self.process.pid))
            self.starts += 1
            self.process.wait()

    def stop(self) -> None:
        """End the command: by SIGTERM, so that nginx ends its workers."""
        self.over = True
        assert self.process is not None
        self.process.terminate()
        self.thread.join(20)
        if self.thread.is_alive():
            self.process.kill()
            self.thread.join(10)


class Deployment:
    """Three replicas, the watcher and nginx, as deploy/ describes them, with other ports and folders."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder = folder
        self.ports = free_ports(4)
        deltas = folder / "deltas"
        deltas.mkdir()
        self.replicas = [
            Supervisor(self._replica(port, deltas, base), folder / f"{port}.pid") for port in self.ports[1:]
        ]
        text = (DEPLOY / "nginx.conf").read_text().replace("127.0.0.1:8080", f"127.0.0.1:{self.ports[0]}")
        (folder / "nginx.conf").write_text(text)
        replicas = (DEPLOY / "replicas.conf").read_text()
        for number, port in enumerate(self.ports[1:], 8001):
            replicas = replicas.replace(str(number), str(port))
        (folder / "replicas.conf").write_text(replicas)
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        assert NGINX is not None
        self.nginx = [NGINX, "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"]
        daemon = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
        self.balancer = Supervisor([*self.nginx, "-g", daemon], folder / "balancer.pid")
        self.watcher = Supervisor(self._watcher(), folder / "watcher.pid")
        self._write_restart()

    @staticmethod
    def _replica(port: int, deltas: Path, base: Path) -> list[str]:
        command = exec_start("bitfit@.service")
        own = {"/srv/bitfit/deltas": str(deltas), "/srv/bitfit/base": str(base), "%i": str(port)}
        arguments = [own.get(word, word) for word in command[1:]]
        return [sys.executable, "-m", "bitfit", *arguments, "--workers", "1", "--log", "warning"]

    def _watcher(self) -> list[str]:
        command = exec_start("bitfit-replicas.service")
        assert command[1].endswith("watch_replicas.py") and command[2] == "--file" and command[4] == "--reload"
        addresses = [f"127.0.0.1:{port}" for port in self.ports[1:]]
        reload = shlex.join([*self.nginx, "-s", "reload"])
        file = str(self.folder / "replicas.conf")
        script = str(DEPLOY / "watch_replicas.py")
        return [sys.executable, script, "--file", file, "--reload", reload, *addresses]

    def _write_restart(self) -> None:
        """What `systemctl restart` does: send SIGTERM and wait for the end; the supervisor starts it again."""
        script = self.folder / "restart"
        script.write_text(f'#!/bin/sh\nread pid < {self.folder}/$1.pid || true\nkill "$pid"\n'
                          'while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done\n')  # fmt: skip
        script.chmod(0o755)

    def restart_all(self) -> subprocess.CompletedProcess[str]:
        command = [str(DEPLOY / "rolling-restart.sh"), *map(str, self.ports[1:])]
        environment = {**os.environ, "RESTART": str(self.folder / "restart")}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)

    def listed(self) -> set[int]:
        """The ports that nginx sends requests to."""
        return {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", (self.folder / "replicas.conf").read_text())}

    def ready(self) -> bool:
        return all(Client(f"http://127.0.0.1:{port}").ready() for port in self.ports[1:])

    def stop(self) -> None:
        for supervisor in (self.watcher, self.balancer, *self.replicas):
            supervisor.stop()

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    if NGINX is None:
        pytest.skip("needs nginx (apt-get install nginx-light)")
    found = Deployment(tmp_path, make_folder(tmp_path / "tiny", "bert"))
    try:
        until(found.ready, 120)
        yield found
    finally:
        found.stop()
        print(found.logs())


async def under_load(churn: Churn, *disturbances: Any) -> None:
    """Ask and replace 20 tasks a second, until the disturbances are over and three more seconds have passed."""
    await churn.put_all()
    await asyncio.sleep(LAG)
    asking = [asyncio.create_task(churn.ask(number, 1 << 30, 0.2)) for number in range(8)]
    churning = [asyncio.create_task(churn.churn(churn.names[k::2], 2 / 20)) for k in range(2)]
    await asyncio.sleep(3)
    for disturbance in disturbances:
        await asyncio.to_thread(disturbance)
    await asyncio.sleep(3)
    churn.over = True
    await asyncio.gather(*asking, *churning)


def test_a_killed_replica_and_a_rolling_restart_under_load_cost_no_answer(deployment, tmp_path):
    churn = Churn(load_base(tmp_path / "tiny"), deployment.url, removals=0.0, lag=LAG, retries=1)
    killed = deployment.replicas[1]

    def kill() -> None:
        assert killed.process is not None
        killed.process.send_signal(signal.SIGKILL)
        until(lambda: killed.starts == 2 and deployment.ready(), 120)

    restarted = []
    began = time.monotonic()
    asyncio.run(under_load(churn, kill, lambda: restarted.append(deployment.restart_all())))
    seconds = time.monotonic() - began
    print(f"\n{churn.codes.total()} requests, {churn.changes} changes in {seconds:.0f} s")
    print(f"codes {dict(churn.codes)}, retried {dict(churn.retried)}")
    assert restarted[0].returncode == 0, restarted[0].stderr
    assert [replica.starts for replica in deployment.replicas] == [2, 3, 2]
    assert not churn.wrong, churn.wrong[:3]
    assert set(churn.codes) <= {200, 429} and churn.codes[200] > 100


def test_a_stuck_replica_leaves_the_list_and_comes_back(deployment):
    until(lambda: deployment.listed() == set(deployment.ports[1:]), 60)
    pid = deployment.replicas[0].process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    stuck = [int(child) for child in children]
    for child in stuck:
        os.kill(child, signal.SIGSTOP)
    try:
        until(lambda: deployment.ports[1] not in deployment.listed(), 60)
    finally:
        for child in stuck:
            os.kill(child, signal.SIGCONT)
    until(lambda: deployment.ports[1] in deployment.listed(), 60)


def test_the_commands_of_unit_and_container_are_valid():
    unit = exec_start("bitfit@.service")
    container = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Containerfile").read_text(), re.M)
    for words in (unit[1:], json.loads(container[0])[1:]):
        assert words[0] == "serve"
        parser().parse_args([word.replace("%i", "8001") for word in words])
