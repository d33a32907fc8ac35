"""Start and stop real vLLM engines on this machine, for tests, demos and benchmarks.

    with cluster(prefill=1, decode=1, device="cpu", options=ClusterOptions()) as c:
        c.prefill[0].url, c.decode[0].side_channel_port, c.decode[0].log_path

The engines are subprocesses; this package imports nothing of vLLM.
"""

from tools.cluster.engine import Engine
from tools.cluster.errors import ClusterError, NoFreePortError, ProcessFailedError
from tools.cluster.lifecycle import Cluster, cluster
from tools.cluster.model import ModelShape, make_model
from tools.cluster.options import ClusterOptions, RoleOptions
from tools.cluster.ports import PortReservations
from tools.cluster.process import ManagedProcess

__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterOptions",
    "Engine",
    "ManagedProcess",
    "ModelShape",
    "NoFreePortError",
    "PortReservations",
    "ProcessFailedError",
    "RoleOptions",
    "cluster",
    "make_model",
]
