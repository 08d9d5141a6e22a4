import json

import pytest

from relibra import ConfigError
from relibra.cli.serve.run import ALONE, planned_workers
from relibra.planning.deployment.deployment_files import read_deployment

CONFIG = {
    "model_type": "mixtral", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 2048,
    "vocab_size": 1000,
}  # fmt: skip


def test_a_server_takes_workers_and_micro_batches_from_a_plan(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "plan.json"
    assert run("serve", "plan", tmp_path, "--gpus", "l40s", "--max-gpus", "8", "--output", path)[0] == 0
    plan = read_deployment(path)
    assert planned_workers(path, tmp_path) == (plan.attention.nodes, plan.experts.nodes, plan.micro_batches)
    assert planned_workers(None, tmp_path) == ALONE
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_local_experts": 4}))
    with pytest.raises(ConfigError, match=r"2 of 8 experts, hidden 1024.*has 4 layers, 2 of 4 experts"):
        planned_workers(path, tmp_path)
