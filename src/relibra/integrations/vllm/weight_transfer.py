"""vLLM's end of `rollout.transfer` "gloo" and "nccl": the back end "relibra" of its weight transfer.

The entry point `relibra_transfer` registers it; `--weight-transfer-config '{"backend": "relibra"}'` chooses it. vLLM's
own back end for NCCL exchanges a pickle when it is set up, and waits without a time-out; there is none for CPUs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from relibra.rl.rollout.served.weight_group import BucketLayout, GroupAddress, broadcast_bucket, join_group


class WeightReceiver(WeightTransferEngine):  # type: ignore[misc]
    """Receives buckets of weights from rank 0 of a process group, which lasts for one version."""

    init_info_cls = GroupAddress
    update_info_cls = BucketLayout
    group: Any = None

    def init_transfer_engine(self, init_info: GroupAddress) -> None:
        """Join the group of the trainer."""
        parallel, timeout = self.parallel_config, timedelta(seconds=init_info.timeout_seconds)
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(init_info.host, init_info.port, timeout=timeout)  # type: ignore[attr-defined]
        self.group = join_group(store, init_info, init_info.rank_offset + worker)

    def start_weight_update(self) -> None:
        """Begin to load layer by layer."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a bucket and load it.

        raises    ValueError for what is no bucket; RuntimeError without a group, or where the trainer is gone
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketLayout) -> None:
        """Receive all tensors of a bucket before loading any: where the model refuses one, none is still on its way."""
        group, self.group = self.group, None  # an error closes it, which the trainer notices at once
        if group is None:
            raise RuntimeError("no trainer is joined, or an update before this one failed")
        bucket = update_info.allocate(self.device)
        for work in broadcast_bucket(group, bucket):
            work.wait()
        self.model.load_weights(bucket)
        self.group = group

    def finish_weight_update(self) -> None:
        """End loading, and leave the group."""
        finalize_layerwise_reload(self.model, self.model_config)
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise: relibra sends by itself."""
        raise NotImplementedError
