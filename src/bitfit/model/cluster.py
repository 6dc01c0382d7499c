"""The Ray cluster that studies, trainings and scorings run on. Ray is imported when it is needed."""

from __future__ import annotations

import os
from typing import Any

from .. import __version__
from ..errors import UsageError

LOOPBACK = "127.0.0.1"
# Ray reads this variable when it is imported. With "0" it listens on the loopback address only, on any system. (An
# address of 127.0.0.1 given to ray.init is replaced by one that other machines can reach.)
CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def connect(address: str | None = None, workers: int | None = None) -> Any:
    """Ray, connected to the cluster at `address`; without one, to a local Ray (loopback only, no dashboard)."""
    if address is None:
        os.environ.setdefault(CLUSTER, "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError('--engine ray needs Ray: pip install "bitfit[ray]"') from error
    if not ray.is_initialized():
        quiet = {"log_to_driver": False, "logging_level": "error"}
        if address is not None:
            ray.init(address=address, **quiet)
        else:
            ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
    if address is None and ray.util.get_node_ip_address() != LOOPBACK:
        raise UsageError(
            "Ray was imported before bitfit and accepts connections from other machines; run bitfit in a new process"
        )
    return ray


def check_version(ray: Any, version: str) -> None:
    """Refuse to work on a node whose bitfit is not the one of the driver."""
    if version != __version__:
        node = ray.util.get_node_ip_address()
        raise UsageError(f"node {node} has bitfit {__version__}, this command is of {version}; install the same")
