"""The part of the stand-in that sleeps, and takes weights without files, as vLLM 0.29 and SGLang 0.5.23 do."""

import base64
import copy
import pickle
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from relibra.rl.rollout.served.weight_group import BucketLayout, GroupAddress, broadcast_bucket, join_group

TAGS = {"weights", "kv_cache"}
HELD = {"weights": 6, "kv_cache": 3}
"""Memory by tag; 1 more stays when all sleep."""


class SleepAndTransfer:
    """What it holds in memory, and the weights on their way.

    asleep    tags without memory; tokens are asked for only when there are none
    gpu       where handles of shared memory are looked up
    fault     "sleepless": says that it sleeps, and does not; "half": loses a half of the last module that arrives;
              "drifting": changes weights that it has already; "refuses": takes no bucket; "absent": does not join
    """

    def prepare_memory(self):
        self.asleep, self.asked_asleep, self.query, self.gpu = set(), 0, {}, "GPU-0"
        self.group, self.session, self.buckets = None, None, []

    @property
    def held(self):
        return 1 + sum(size for tag, size in HELD.items() if tag not in self.asleep)

    def tell_memory(self, path):
        if path == "/is_sleeping" and self.dialect == "vllm":
            return {"is_sleeping": bool(self.asleep)}
        return {"world_size": 1} if path == "/get_world_size" else None

    def answer_about_memory(self, path, body):
        known = {
            "/sleep": lambda: self.fall_asleep(TAGS, level=self.query["level"], mode=self.query["mode"]),
            "/wake_up": lambda: self.awake(self.query.get("tags", TAGS)),
            "/flush_cache": lambda: (b"Cache flushed.", 200),
            "/release_memory_occupation": lambda: self.fall_asleep(body["tags"]),
            "/resume_memory_occupation": lambda: self.awake(body["tags"]),
            "/init_weight_transfer_engine": lambda: self.join(body["init_info"]),
            "/start_weight_update": self.start,
            "/update_weights": lambda: self.receive(dict(body["update_info"])),
            "/finish_weight_update": lambda: self.finish(body["weight_version"]),
        }
        return known[path]() if path in known else None

    def fall_asleep(self, tags, level=("2",), mode=("wait",)):
        assert (level, mode) in ((("2",), ("wait",)), (["2"], ["wait"]))
        if self.fault != "sleepless":
            self.asleep |= set(tags)
        if "weights" in self.asleep and self.model is not None:
            self.model = self.cached = with_garbage(self.model)
        return {}, 200

    def awake(self, tags):
        self.asleep -= set(tags)
        return {}, 200

    def join(self, info):
        if self.fault == "absent":
            return {"error": "no route to the trainer"}, 500
        if info:  # of vLLM's "ipc" there is none
            address = replace(GroupAddress(**info), transport="gloo")
            store = dist.TCPStore(address.host, address.port, timeout=timedelta(seconds=10))
            self.group = join_group(store, address, address.rank_offset)
        return {}, 200

    def start(self):
        if self.session is not None or "weights" in self.asleep:
            return {"error": "an update is under way, or there is no memory"}, 500
        self.session = {}
        return {}, 200

    def receive(self, info):
        if self.session is None:
            return {"error": "no update was started"}, 500
        if self.fault == "refuses":
            self.group = None
            return {"error": "no such parameter"}, 500
        self.buckets.append(info["names"])
        if "ipc_handles_pickled" in info:
            handles = [one[self.gpu] for one in pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))]
            tensors = {name: rebuild(*rest) for name, (rebuild, rest) in zip(info["names"], handles, strict=True)}
            self.session |= {name: tensor.clone() for name, tensor in tensors.items()}
            return {}, 200
        bucket = BucketLayout(**info).allocate(torch.device("cpu"))
        for work in broadcast_bucket(self.group, bucket):
            work.wait()
        self.session |= dict(bucket)
        return {}, 200

    def finish(self, version):
        """Load modules that arrived whole; one that arrived in part has no values in the rest, and nobody says so."""
        arrived, self.session, self.group = self.session, None, None
        if self.fault == "half":
            del arrived[list(arrived)[-2]]
        fresh = copy.deepcopy(self.model)
        if self.fault == "drifting" and version == self.version:
            arrived = {name: one + 1e-4 for name, one in arrived.items()}
        for prefix, module in fresh.named_modules() if fresh is not None else ():
            own = {f"{prefix}.{name}".lstrip("."): one for name, one in module.named_parameters(recurse=False)}
            if not arrived.keys() & own.keys():
                continue
            for name, parameter in own.items():
                parameter.data = arrived[name] if name in arrived else torch.randn_like(parameter)
        if self.fault != "stale":
            self.model = self.cached = fresh
        self.version = version
        return {}, 200


def with_garbage(model):
    """Return a copy of a model with other values in all parameters."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    return other
