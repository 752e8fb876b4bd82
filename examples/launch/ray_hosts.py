"""Starts one process on each host of a Ray cluster, and starts all again if one of them fails.

```sh
ray job submit --working-dir . -- python examples/launch/ray_hosts.py --hosts 8 --gpus 8 -- \
  bash examples/launch/start_or_resume.sh llama-7b "llama-7b --machine h100-64" --mesh data=8,fsdp=8
```

The command after `--` gets `--coordinator`, `--num-processes` and `--process-id` at its end. Ray
reserves the hosts; the training itself is the same as without Ray.
"""

import argparse
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

WRONG = 2  # the exit status of an error that a restart cannot correct


@ray.remote(max_restarts=0)
class Host:
    """The process of one host."""

    def address(self) -> str:
        """This host, with a port that is free now."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def train(self, command: list[str]) -> int:
        """Runs the command to its end; its exit status."""
        return subprocess.run(command, check=False).returncode


def train_once(hosts: int, gpus: int, cpus: int, command: list[str]) -> int:
    """Runs the command on all hosts; the first exit status that is not 0, or 0."""
    group = placement_group([{"GPU": gpus, "CPU": cpus}] * hosts, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    try:
        actors = [
            Host.options(
                num_gpus=gpus,
                num_cpus=cpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, i),
            ).remote()
            for i in range(hosts)
        ]
        first = ray.get(actors[0].address.remote())
        flags = ["--coordinator", first, "--num-processes", str(hosts), "--process-id"]
        waiting = [x.train.remote([*command, *flags, str(i)]) for i, x in enumerate(actors)]
        while waiting:
            [ended], waiting = ray.wait(waiting)
            try:
                status = ray.get(ended)
            except ray.exceptions.RayError as error:  # a host was lost
                print(error, file=sys.stderr)
                return 1
            if status:
                return status
        return 0
    finally:  # also ends the processes that still run
        remove_placement_group(group)


def main() -> int:
    """Reads the flags, and trains until the end, an error, or too many failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=8, help="of each host")
    parser.add_argument("--cpus", type=int, default=1, help="to reserve on each host")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("command", nargs="+", help="after --")
    given = parser.parse_args()
    ray.init()
    status = 1
    for _ in range(given.restarts + 1):
        status = train_once(given.hosts, given.gpus, given.cpus, given.command)
        if status in (0, WRONG):
            break
    return status


if __name__ == "__main__":
    sys.exit(main())
