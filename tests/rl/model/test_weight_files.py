"""Weight files that are written layer by layer: the bytes of `save_pretrained`; and what ranks hold and read."""

import gc
import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, core_model_loading
from transformers.distributed.sharding_utils import DtensorShardOperation

from relibra.rl.model import weight_files
from relibra.rl.model.policy import save_policy
from relibra.rl.model.weight_files import StoredWeights, write_folder
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from tests.replay.tiny_models import tiny_model
from tests.rl.joined import on_ranks, policy_of, tiny_config


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(model, folder, dtype=None):
    stored = StoredWeights(model, dtype)
    write_folder(folder, stored, stored.gather(model, wanted=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_those_of_save_pretrained(tmp_path, family, dtype):
    tiny_model(family).save_pretrained(tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=dtype)
    model.save_pretrained(tmp_path / "theirs")
    write(model, tmp_path / "ours")
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")


def test_several_files_have_an_index_and_hold_the_same(tmp_path, monkeypatch):
    model = tiny_model(tie_word_embeddings=True)
    monkeypatch.setattr(weight_files, "FILE_BYTES", 30_000)
    write(model, tmp_path / "ours")
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert max((tmp_path / "ours" / file).stat().st_size for file in files) < 40_000
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def write_quantized(folder):
    """Write a tiny gpt-oss whose experts are in MXFP4; return their values in float32."""
    model = tiny_model("gpt_oss", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    fours = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    fours, values = torch.cat([fours, -fours]), {}
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        experts, rows, columns = weights.pop(key).shape  # [E, in, out]; blocks are [E, out, in / 32, 16]
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, (experts, columns, rows // 32), dtype=torch.uint8)
        weights |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        pairs = torch.stack([fours[(blocks & 15).long()], fours[(blocks >> 4).long()]], dim=-1).flatten(-2)
        values[key] = (pairs * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return values


def train_quantized(folder):
    policy = policy_of(
        tiny_config(f"model.path={folder / 'model'}", ranks=dist.get_world_size()), folder, samples=False
    )
    whole = {name: p.full_tensor() for name, p in policy.trained.named_parameters() if "_proj" in name}
    save_policy(policy, CharacterTokenizer("01."), folder / "policy")
    return {name: whole[name] for name in whole if "experts" in name}


def test_mxfp4_is_dequantized_and_trained(tmp_path):
    expected = write_quantized(tmp_path / "model")
    for found in on_ranks(2, train_quantized, tmp_path):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "policy" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert all(torch.equal(again.get_parameter(name), value) for name, value in expected.items())


def held_bytes():
    """Return the bytes of all tensors of this process."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not isinstance(one, DTensor)]
    of_storages = [one.untyped_storage() for one in tensors if not one.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in of_storages}.values())


def load_counting(folder):
    """Load a policy that a server samples; return bytes that this rank read, holds, and would hold of the whole."""
    read, shard, copy, before = (
        [],
        DtensorShardOperation.shard_tensor,
        core_model_loading._materialize_copy,
        held_bytes(),
    )

    def counted(load):
        def load_and_count(*given, **named):
            found = load(*given, **named)
            read.append(0 if found is None or found.is_meta else found.nbytes)
            return found

        return load_and_count

    DtensorShardOperation.shard_tensor, core_model_loading._materialize_copy = counted(shard), counted(copy)
    config = tiny_config(f"model.path={folder / 'model'}", ranks=dist.get_world_size())
    policy = policy_of(config, folder, samples=False)
    own = sum(p.to_local().nbytes for p in policy.trained.parameters())
    whole = sum(p.nbytes for p in policy.meta.parameters())
    return {"read": sum(read), "own": own, "held": held_bytes() - before, "all": whole}


def test_a_rank_reads_and_holds_its_shard(tmp_path):
    """Rank 0 reads the experts of one layer more, to compare them with the shards."""
    tiny_model(num_hidden_layers=4, vocab_size=512).save_pretrained(tmp_path / "model")
    one, other = on_ranks(2, load_counting, tmp_path)
    for found in (one, other):
        assert found["own"] <= 0.51 * found["all"]
        assert found["held"] <= 1.1 * found["own"]
    assert other["read"] <= 1.01 * other["own"]
    assert one["read"] <= 1.5 * one["own"]
