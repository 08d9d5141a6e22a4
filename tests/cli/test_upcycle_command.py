"""`relibra upcycle`: the built-in model of a run, grown."""

import json

import pytest
import torch
import transformers

from relibra.replay import find_routers


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from relibra.rl.config.run_config import load_config
    from relibra.rl.run.checkpoints.policy_folder import write_start_folder

    folder = tmp_path_factory.mktemp("models") / "policy"
    write_start_folder(load_config(None), folder)
    (folder.parent / "sums.txt").write_text("".join(f"{a}+{b}={a + b}" for a in range(40) for b in range(0, 60, 7)))
    return folder


def test_a_grown_model_loads_and_says_what_it_lost(run, policy, tmp_path):
    words = ("upcycle", policy, "--experts", "2x", "--data", policy.parent / "sums.txt", "--output")
    plain = json.loads(run(*words, tmp_path / "plain", "--json")[1])
    assert plain["twin_tokens"] > 0.98
    assert plain["output_change"] > 0.01
    kept = json.loads(run(*words, tmp_path / "kept", "--keep-function", "--json")[1])
    assert kept["output_change"] < 1e-5
    ids = torch.arange(2, 12)[None]
    logits = []
    for path in (policy, tmp_path / "kept"):
        model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    assert find_routers(model)[0].num_experts == kept["experts"]
    assert find_routers(model)[0].top_k == kept["choices"] == 2 * plain["choices"]
    assert run(*words, tmp_path / "third", "--copies", "utility")[0] == 0
    assert "kept is not empty: choose a new folder" in run(*words, tmp_path / "kept")[2]
    assert "all experts get as many copies" in run(*words, tmp_path / "no", "--keep-function", "--copies", "utility")[2]
