"""Weights of a whole model for servers, and its scores for their canary, without a group of ranks."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from relibra.rl.model.weight_files import StoredWeights, write_folder
from relibra.rl.rollout.served import weights
from relibra.rl.rollout.served.canary_probe import Canary, CanaryReport
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.trained_scores import Scorer, score_sequence


def publish_weights(model: Any, folder: Path, engine: ServerEngine, version: int) -> Path:
    """Write a model into a folder of its own, let the servers load it, and return the folder."""
    path, stored = folder.absolute() / f"version-{version:06d}-{secrets.token_hex(4)}", StoredWeights(model)
    write_folder(path, stored, stored.gather(model, wanted=True))
    weights.let_all_read(path)
    weights.publish_weights(path, engine, version)
    return path


def compare(canary: Canary, model: Any, version: int) -> CanaryReport:
    """Return what a canary says of its servers after an update to the weights of a model."""
    return canary.after_update(scorer_of(model, canary), version)


def scorer_of(model: Any, canary: Canary) -> Scorer:
    client = canary.servers[0].client

    def score(sequences: Any) -> Any:
        return [
            score_sequence(
                model, tokens, given=given, temperature=client.temperature, with_routes=client.routes is not None
            )
            for tokens, given in sequences
        ]

    return score
