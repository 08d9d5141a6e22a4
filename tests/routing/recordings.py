"""Payloads as engines and frameworks build them, made without the readers: for tests and for damaged inputs.

`write` puts them into files, and `read` imports those.

Each function follows the released code named in the reader's first lines, in this project's own words.
"""

import base64
import io
import json
import pickle

import msgspec
import numpy as np
import torch
from safetensors.numpy import save_file

from relibra.routing.readers.formats import ImportRules, import_samples
from relibra.routing.readers.formats.normalise import ImportCounts, iterate_pieces
from relibra.routing.trace import concatenate

EXPERTS = 16


def write(path, data):
    """Write bytes, a text, or a value in the form that the ending of the name says; return the path."""
    if isinstance(data, bytes | str):
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    elif path.suffix == ".pt":
        torch.save(data, path)
    elif path.suffix == ".safetensors":
        save_file({key: np.ascontiguousarray(array) for key, array in data.items()}, path)
    elif path.suffix == ".npz":
        np.savez(path, **data)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in data))
    else:
        path.write_text(json.dumps(data, indent=2))
    return path


def read(path, format, counts=None, **rules):
    """Return the trace of a file."""
    rules = ImportRules(num_experts=EXPERTS, **rules)
    found = import_samples([path], format, rules)
    return concatenate(list(iterate_pieces(found, rules, counts or ImportCounts(), source="test")))


def tensor(array):
    return torch.from_numpy(np.ascontiguousarray(array))


def tensors(arrays):
    return {name: tensor(array) for name, array in arrays.items()}


def routes(rng, rows, layers=3, experts=16, top_k=2, dtype=np.int32):
    """Return ids [rows, layers, choices]; the choices of a row differ, and none is all zero."""
    return np.argsort(rng.random((rows, layers, experts)), axis=-1)[..., :top_k].astype(dtype)


def npy_base64(ids):
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue()).decode()


def raw_base64(ids):
    return base64.b64encode(np.ascontiguousarray(ids, "<i4").tobytes()).decode()


def packed(ids, **more):
    data = base64.b64encode(np.ascontiguousarray(ids).tobytes()).decode()
    return {"data": data, "shape": list(ids.shape), "dtype": ids.dtype.name, **more}


def nrlre(ids):
    data = base64.b64encode(np.ascontiguousarray(ids).tobytes()).decode()
    return f"nrlre1:{ids.dtype.name}:{'x'.join(map(str, ids.shape))}:{data}"


def vllm_answer(ids, prompt, new):
    """An answer of /inference/v1/generate."""
    logprobs = {"content": [{"token": "token_id:5", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * new}
    choice = {"index": 0, "logprobs": logprobs, "finish_reason": "stop", "token_ids": [5] * new}
    usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {"request_id": "a", "choices": [{**choice, "routed_experts": npy_base64(ids)}], "usage": usage}


def sglang_answer(ids, prompt, new, start=0):
    about = {"id": "a", "prompt_tokens": prompt, "completion_tokens": new, "weight_version": "7"}
    about |= {"routed_experts": raw_base64(ids)} | ({"routed_experts_start_len": start} if start else {})
    return {"text": "x", "output_ids": [5] * new, "meta_info": about}


def megatron_answer(ids, prompt, new):
    choice = {"index": 0, "prompt_token_ids": [1] * prompt, "generation_token_ids": [2] * new}
    return {"choices": [{**choice, "moe_topk_indices": ids.tolist(), "prompt_moe_topk_indices": ids[:prompt].tolist()}]}


def gym_result(samples):
    """A NeMo Gym result with one turn after the other; samples: routes of each turn, prompt and new tokens."""
    output = []
    for ids, prompt, new in samples:
        full = np.broadcast_to(np.arange(ids.shape[2], dtype=ids.dtype), (prompt + new, *ids.shape[1:])).copy()
        full[: len(ids)] = ids
        full[len(ids) : prompt + new - 1] = -1
        turn = {"prompt_token_ids": [1] * prompt, "generation_token_ids": [2] * new, "routed_experts": nrlre(full)}
        output += [{"type": "function_call_output"}, turn]
    return {"response": {"output": output}, "reward": 1.0}


def verl_batch(samples, prompt_width, response_width):
    """samples: (routes [p + m - 1], p, m) each; prompts are padded on the left, responses on the right."""
    n = prompt_width + response_width
    full = np.zeros((len(samples), n, *samples[0][0].shape[1:]), dtype=np.int16)
    mask = np.zeros((len(samples), n), dtype=np.int64)
    for row, (ids, prompt, new) in enumerate(samples):
        start = prompt_width - prompt
        full[row, start : start + len(ids)] = ids
        mask[row, start : prompt_width + new] = 1
    return {
        "routed_experts": full,
        "attention_mask": mask,
        "responses": np.ones((len(samples), response_width), np.int64),
    }


def skyrl_batch(samples, padding=0):
    """Padded on the left; fillers 0, 1, ...; the last `padding` samples repeat the first without routes."""
    width, response_width = max(p + m for _, p, m in samples), max(m for _, _, m in samples)
    shape = samples[0][0].shape[1:]
    full = np.broadcast_to(np.arange(shape[1]), (len(samples) + padding, width, *shape)).astype(np.uint8)
    mask = np.zeros((len(samples) + padding, width), dtype=np.int64)
    response = np.zeros((len(samples) + padding, response_width), dtype=np.int64)
    skip = np.ones(mask.shape, dtype=bool)
    for row, (ids, prompt, new) in enumerate([*samples, *samples[:1] * padding]):
        left = width - prompt - new
        mask[row, left:] = 1
        response[row, response_width - new :] = 1
        if row < len(samples):
            full[row, left : left + len(ids)] = ids
            skip[row, left : left + len(ids)] = False
    names = ("rollout_expert_indices", "attention_mask", "response_mask", "router_padding_mask")
    return dict(zip(names, (full, mask, response, skip), strict=True))


def skyrl_pickle(batch):
    """The pickle of a `TensorBatch`, whose class is not there when it is read."""
    entries = {
        name: {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}
        for name, array in batch.items()
    }
    state = {
        "batch_dict": entries | {"pixel_values": None},
        "batch_size": 2,
        "device": None,
        "metadata": {"uids": ["a"]},
    }

    class Batch:
        def __reduce__(self):
            return (_rebuild, (print, state))

    return pickle.dumps(Batch())


def _rebuild(*_):
    raise AssertionError("a reader called what a pickle names")


def nemo_batch(samples):
    """Padded on the right; missing rows are -1, the row of the last token is a filler."""
    width, shape = max(p + m for _, p, m in samples) + 2, samples[0][0].shape[1:]
    full = np.zeros((len(samples), width, *shape), dtype=np.int8)
    lengths = np.array([p + m for _, p, m in samples])
    for row, (ids, _, _) in enumerate(samples):
        full[row, : lengths[row]] = np.arange(shape[1])
        full[row, : len(ids)] = ids
        full[row, len(ids) : lengths[row] - 1] = -1
    return {"routed_experts": full, "input_lengths": lengths}


def slime_samples(samples, wrap):
    """Return the samples of a rollout dump; wrap: makes a tensor of an array."""
    return [
        {
            "group_index": place // 2, "index": 10 + place, "rollout_id": None, "prompt": "x", "tokens": [3] * (p + m),
            "multimodal_inputs": None, "response": "y", "response_length": m, "reward": 0.5, "loss_mask": [1] * m,
            "weight_versions": ["3", "4"], "rollout_log_probs": [-0.5] * m, "rollout_routed_experts": wrap(ids),
            "status": "completed", "metadata": {"source": "z"}, "session_id": None, "non_generation_time": 0.0,
        }
        for place, (ids, p, m) in enumerate(samples)
    ]  # fmt: skip


def megatron_lines(steps):
    """Return lines of a router trace; steps: passes of each step, routes [tokens, layers, K]."""
    lines = []
    for step, passes in enumerate(steps):
        for ids in passes:
            for layer in range(ids.shape[1]):
                top = np.sort(ids[:, layer], axis=-1)
                head = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0}
                lines.append({**head, "num_tokens": len(ids), "topk": ids.shape[2], "top_indices": top.tolist()})
            mtp = {**lines[-1], "block": "mtp", "layer": 0, "mtp_idx": 0}
            lines.append(mtp)
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def recorder_dump(passes, slots_LP, wrap, dense=(), width=8):
    """Return a per_token dump; passes: logical ids [tokens, layers, K]; `dense` layers recorded nothing."""
    records = []
    for number, ids in enumerate(passes):
        T, L, K = ids.shape
        physical = np.full((L, T, width), -1, dtype=np.int32)
        for layer in set(range(L)) - set(dense):
            order = np.argsort(slots_LP[layer], kind="stable")
            first = np.searchsorted(slots_LP[layer][order], ids[:, layer])
            physical[layer, :, :K] = order[first]
        counts = wrap(np.zeros((L, slots_LP.shape[1]), np.int32))
        record = {"forward_pass_id": number, "rank": 0, "gatherer_key": "primary", "input_ids": [1] * T}
        record |= {"positions": [0] * T, "extend_seq_lens": None, "forward_mode": 2, "misc_objects": []}
        records.append({**record, "topk_ids_of_layer": wrap(physical), "global_physical_count": counts})
    return {"records": records, "last_physical_to_logical_map": wrap(slots_LP)}


def prime_batches(micro_batches, pad=0):
    """Return MessagePack of micro-batches; each a list of (routes with a row per token, trained?)."""
    return msgspec.msgpack.encode([_prime_fields(samples, pad) for samples in micro_batches])


def _prime_fields(samples, pad):
    lengths = [len(ids) for ids, _ in samples]
    ids = np.concatenate([ids for ids, _ in samples] + [np.zeros((pad, *samples[0][0].shape[1:]), samples[0][0].dtype)])
    n = sum(lengths)
    lengths[-1] += pad
    floats = [0.5] * (n + pad)
    mask = [i % 2 == 0 and samples[0][1] for i in range(n)] + [False] * pad
    data = np.ascontiguousarray(ids).tobytes()
    experts = [data, list(ids.shape), str(ids.dtype)]
    tokens = [300 * (i % 3) for i in range(n + pad)]
    names = ["gsm8k"] * n + [""] * pad
    return [tokens, mask, floats, floats, list(range(n + pad)), lengths, floats, names, lengths, None, experts]
