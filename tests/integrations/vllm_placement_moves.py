"""Two processes in the environment of vLLM: its own code moves experts to where relibra's policy places them.

Run by `test_vllm_placement.py` with RELIBRA_EPLB set. Prints a line when all weights arrived.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from vllm.distributed.eplb.eplb_communicator import EplbCommunicator
from vllm.distributed.eplb.policy import EPLB_POLICIES
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.plugins import load_general_plugins

LAYERS, EXPERTS, SLOTS, RANKS, WIDTH = 2, 8, 12, 2, 5


class Gloo(EplbCommunicator):
    """Sends between CPUs; those of vLLM need CUDA."""

    def __init__(self):
        self.operations = []

    def add_send(self, tensors, dst_rank, expert_id):  # noqa: ARG002 - vLLM's interface
        self.operations += [dist.P2POp(dist.isend, tensor.clone(), dst_rank) for tensor in tensors]

    def add_recv(self, tensors, src_rank, expert_id):  # noqa: ARG002
        self.operations += [dist.P2POp(dist.irecv, tensor, src_rank) for tensor in tensors]

    def execute(self):
        for request in dist.batch_isend_irecv(self.operations) if self.operations else []:
            request.wait()
        self.operations.clear()


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    load_general_plugins()
    old_LP = torch.arange(SLOTS).remainder(EXPERTS).repeat(LAYERS, 1)
    loads_LE = torch.tensor([[90, 3, 2, 1, 1, 1, 1, 40], [1, 1, 50, 1, 60, 1, 1, 1]], dtype=torch.int32)
    new_LP = EPLB_POLICIES["default"].rebalance_experts(loads_LE, SLOTS, 1, 1, RANKS, old_LP)
    assert new_LP.shape == old_LP.shape and not torch.equal(new_LP, old_LP)  # noqa: PT018
    own = slice(rank * SLOTS // RANKS, (rank + 1) * SLOTS // RANKS)
    weights = [[weight_of(layer, old_LP[layer, own])] for layer in range(LAYERS)]
    rearrange_expert_weights_inplace(
        old_LP, new_LP, weights, [torch.empty_like(weights[0][0])], dist.group.WORLD, Gloo()
    )
    for layer in range(LAYERS):
        assert torch.equal(weights[layer][0], weight_of(layer, new_LP[layer, own])), f"layer {layer}"
    dist.barrier()
    if rank == 0:
        print("placed by", EPLB_POLICIES["default"].__name__, new_LP.tolist())
    dist.destroy_process_group()


def weight_of(layer, experts):
    """Weights that tell layer and expert."""
    return (100.0 * layer + experts.float())[:, None].repeat(1, WIDTH)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder,), nprocs=RANKS)
    sys.stdout.flush()
