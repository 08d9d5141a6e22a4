"""Several raylets on this machine, for tests: a program that starts them, and the handle that a test holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

START_S = 240.0
ROOT = Path(__file__).parent.parent.parent


class RayNodes:
    """A Ray cluster of one machine in processes of its own, which end with the `with` block."""

    def __init__(self, *cpus_of_nodes: int, gpus: int = 0) -> None:
        """Start nodes; each says that it has so many GPUs, of which there need to be none."""
        self._folder = tempfile.mkdtemp(prefix="ray-")  # short: sockets have short names
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.rl.ray_at_work", self._folder, str(gpus), *map(str, cpus_of_nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            },
        )
        self.folder = Path(self._folder)
        self.address, self.node_ids = self._answer()

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._program.communicate("end\n", timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self._program.pid, signal.SIGKILL)
            self._program.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def remove(self, node_id: str) -> None:
        """Kill the processes of a node, as if its machine were gone."""
        self._tell("remove", node_id)

    def add(self, cpus: int) -> str:
        """Start another node; return its id."""
        return self._tell("add", cpus)

    def _tell(self, *words: object):
        assert self._program.stdin is not None
        print(*words, file=self._program.stdin, flush=True)
        return self._answer()

    def _answer(self):
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        assert line, f"the raylets did not start: {self._program.poll()}"
        return json.loads(line)


def nodes_of(stderr: str) -> list[tuple[str, str]]:
    """Return ranks and the first letters of the node id, of each node of the last start of a run."""
    placed = [line for line in stderr.splitlines() if re.match(r"ranks? \d+.* on node ", line)]
    return re.findall(r"(ranks? \d+(?: to \d+)?) on node \S+ \((\w+)\)", placed[-1])


def _serve(folder: str, gpus: int, cpus_of_nodes: list[int]) -> None:
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer

    def answer(value) -> None:
        print(json.dumps(value), file=answers, flush=True)

    store = {"object_store_memory": 80 << 20}
    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder, **store}
    os.makedirs(
        os.path.join(tempfile.gettempdir(), "ray"), exist_ok=True
    )  # Ray notes the address there, whatever temp_dir
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=cpus, num_gpus=gpus, **store) for cpus in cpus_of_nodes]
    answer([cluster.address, [node.node_id for node in nodes]])
    for line in sys.stdin:
        match line.split():
            case ["remove", node_id]:
                [node] = [one for one in nodes if one.node_id == node_id]
                cluster.remove_node(node, allow_graceful=False)
                answer(None)
            case ["add", cpus]:
                nodes.append(cluster.add_node(num_cpus=int(cpus), num_gpus=gpus, **store))
                answer(nodes[-1].node_id)
            case ["end"]:
                break
    cluster.shutdown()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
