"""Collects over two nodes of a local cluster, one of which goes away meanwhile: run by `test_nodes.py`."""

from __future__ import annotations

import json
import sys
import warnings

import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn

from rlcollect import RayCollector, WorkerRestarted
from rlcollect.testing import Echo, check_batch

TOTAL, LANES, REMOTES = 4000, 2, 3


class One(nn.Module):
    """Acts as its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(observation.shape)


def main(sync: bool) -> None:
    """Writes what came of it."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100_000_000})
    spare = {"num_cpus": 1, "object_store_memory": 100_000_000}
    doomed = cluster.add_node(resources={"doomed": 10}, **spare)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    cluster.wait_for_nodes()
    policy, told = One(), {"frames": 0, "versions": set()}
    configs = [{"num_cpus": 0.3}, {"num_cpus": 0.3, "resources": {"doomed": 1}}, {"num_cpus": 0.3}]
    with (
        RayCollector(
            [Echo] * REMOTES,
            policy,
            frames_per_batch=8 * LANES * (REMOTES if sync else 1),
            total_frames=TOTAL,
            num_envs=LANES,
            sync=sync,
            on_worker_failure="restart",
            remote_configs=configs,
            ray_init_config={"address": cluster.address},
            start_timeout=60,
            timeout=60,
        ) as collector,
        warnings.catch_warnings(record=True) as given,
    ):
        warnings.simplefilter("always")
        nodes = [
            place.split("(")[-1]
            for place in collector.map_fn(lambda envs: str(ray.get_runtime_context().get_node_id()))
        ]
        told["nodes"] = len({*nodes})
        previous = {}
        while (batch := collector.next()) is not None:
            parts = enumerate(batch.unbind(0)) if sync else [(int(batch["collector", "traj_ids"].max()) >> 40, batch)]
            for worker, part in parts:
                check_batch(part, previous=previous.get(worker))
                previous[worker] = part.clone()
            told["frames"] += batch.numel()
            for version, action in zip(
                batch["collector", "policy_version"].flatten().tolist(), batch["action"].flatten().tolist(), strict=True
            ):
                told["versions"].add((version, action))
            if doomed is not None and told["frames"] > TOTAL // 4:
                with torch.no_grad():
                    policy.weight.fill_(2.0)
                collector.update_policy_weights_()
                cluster.add_node(resources={"doomed": 10}, **spare)  # where the remote can be made anew
                cluster.remove_node(doomed)
                doomed = None
        told["collected"] = collector.collected_frames
        told["restarts"] = [each.restarts for each in collector.stats().workers]
        told["warned"] = [str(each.message) for each in given if isinstance(each.message, WorkerRestarted)]
    told["versions"] = sorted(told["versions"])
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1] == "sync")
