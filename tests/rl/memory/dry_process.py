"""A dry run in a process of its own: prints what was counted as JSON. Arguments: layers, then settings."""

import json
import sys
from dataclasses import asdict, replace

import torch

from relibra.calibration.machine import find_cluster
from relibra.rl.config.run_config import load_config
from relibra.rl.memory.dry_run import cut_layers, dry_run
from relibra.rl.memory.stand_ins import StandIns
from relibra.rl.memory.worker import model_config_of


def main():
    layers, *settings = sys.argv[1:]
    config = load_config(None, settings)
    ranks = config.parallel.ranks
    stand_ins = StandIns(ranks)
    cluster = replace(find_cluster(config.plan.cluster, torch.device("cpu"), ranks, ranks), dispatch="flat")
    model_config = cut_layers(model_config_of(config), int(layers))
    has_copy = config.rollout.engine == "embedded"
    found = dry_run(config, model_config, cluster, stand_ins, has_copy=has_copy)
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
