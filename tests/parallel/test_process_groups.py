"""Further groups beside a default group that is bound to a device, as `transformers` makes it for NCCL."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from relibra.parallel.process_groups import make_same_ranks_group


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_gloo_group_is_not_split_with_the_default_group(world):
    """torch would look for the communicator of the device to split, whatever the backend of the new group is."""
    bound, seen, make = torch.device("cuda:0"), [], dist.new_group

    def noted(*args, **settings):
        seen.append((settings["backend"], world.bound_device_id))
        return make(*args, **settings)

    world.bound_device_id = bound
    with mock.patch.object(dist, "new_group", noted):
        groups = [make_same_ranks_group(world, torch.device("cpu"), backend=backend) for backend in ("gloo", None)]
    assert [dist.get_process_group_ranks(group) for group in groups] == [[0], [0]]
    assert seen == [("gloo", None), (None, bound)]
    assert world.bound_device_id == bound
    world.bound_device_id = None


def test_a_further_group_has_the_time_out_of_the_first(tmp_path):
    seconds = timedelta(seconds=77)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, timeout=seconds)
    group = make_same_ranks_group(dist.group.WORLD, torch.device("cpu"))
    assert group._get_backend(torch.device("cpu")).options._timeout == seconds
    dist.destroy_process_group()
