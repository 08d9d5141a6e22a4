"""Cases of recordings of engines and frameworks: payloads as released code builds them, then damaged."""

import io
import json
import struct
from functools import cache, partial

import numpy as np
import torch

from relibra.routing.readers.encodings.inert_pickle import read_pickle
from relibra.routing.readers.formats import Format, ImportRules, ShortRows, ZeroRows, import_samples
from relibra.routing.readers.formats.normalise import ImportCounts, iterate_pieces
from relibra.routing.readers.formats.wire_routes import decode_base64
from tests.fuzz.mutations import mutate_array, mutate_bytes, mutate_json, mutate_value, pick
from tests.routing import recordings as made


def _rules(rng):
    return ImportRules(
        num_experts=int(pick(rng, (16, 16, 8, 300, 65536))),
        layers=pick(rng, (None, None, (0, 1, 2), (1, 2), (5,))),
        zero_rows=pick(rng, list(ZeroRows)),
        short_rows=pick(rng, list(ShortRows)),
        top_k=pick(rng, (None, 2, 2, 8)),
        recorded_layers=pick(rng, (None, 3, 3, 1 << 16)),
    )


def _import(rng, path, format):
    rules, counts = _rules(rng), ImportCounts()
    pieces = list(iterate_pieces(import_samples([path], format, rules), rules, counts, source="fuzz"))
    for piece in pieces:
        piece.validate()
    assert sum(piece.num_rows for piece in pieces) == counts.rows
    assert sum(int((~piece.valid_T).sum()) for piece in pieces) == counts.missing_rows


@cache
def _samples():
    rng = np.random.default_rng(0)
    return [(made.routes(rng, prompt + new - 1), prompt, new) for prompt, new in ((4, 3), (1, 5), (6, 2))]


def _damaged(rng, path, data, share=0.6):
    return made.write(path, mutate_bytes(rng, data) if rng.random() < share else data)


def _ids(rng, ids):
    return mutate_array(rng, ids) if rng.random() < 0.3 else ids


@cache
def _answers():
    ids, prompt, new = _samples()[0]
    packed = made.vllm_answer(ids, prompt, new)
    packed["choices"][0]["routed_experts"] = made.packed(ids.astype(np.uint8), start=0)
    return {
        "vllm": made.vllm_answer(ids, prompt, new),
        "sglang": made.sglang_answer(ids, prompt, new),
        "skyrl_and_prime": packed,
        "nemo_gym": made.gym_result([(ids.astype(np.int8), prompt, new)]),
        "megatron": made.megatron_answer(ids, prompt, new),
    }


def _imported_answers(engine, rng, folder):
    answers = [_answers()[engine] for _ in range(int(rng.integers(1, 4)))]
    if rng.random() < 0.2:
        answers.append(pick(rng, list(_answers().values())))
    if rng.random() < 0.3 and engine == "vllm":
        try:
            answers[0] = made.vllm_answer(mutate_array(rng, _samples()[0][0]), 4, 3)
        except ValueError:  # numpy writes no arrays of some types
            return
    answers = [mutate_json(rng, one) if rng.random() < 0.4 else one for one in answers]
    if rng.random() < 0.5:
        data = json.dumps(answers, indent=pick(rng, (None, 2))).encode()
    else:
        data = "".join(json.dumps(one) + "\n" for one in answers).encode()
    _import(rng, _damaged(rng, folder / "a.json", data), Format.ANSWERS)


@cache
def _batches():
    samples = _samples()
    return {
        Format.VERL: made.verl_batch(samples, 8, 7),
        Format.SKYRL: made.skyrl_batch(samples, 1),
        Format.NEMO_RL: made.nemo_batch(samples),
    }


def _safetensors(rng, arrays):
    """Write a file of tensors whose header is as it should be, or damaged."""
    kinds = {"u": "U", "i": "I", "b": "BOOL", "f": "F"}
    header, body = {}, b""
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        kind = kinds.get(array.dtype.kind, "C")
        dtype = kind if kind == "BOOL" else f"{kind}{8 * array.dtype.itemsize}"
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(mutate_json(rng, header) if rng.random() < 0.5 else header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _torch_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _imported_batches(format, rng, folder):
    arrays = {name: _ids(rng, array) for name, array in _batches()[format].items() if rng.random() < 0.95}
    kind = pick(rng, ("safetensors", "npz", "pt", "pkl"))
    if kind == "safetensors":
        data = _safetensors(rng, arrays)
    elif kind == "npz":
        file = io.BytesIO()
        np.savez(file, **arrays)
        data = file.getvalue()
    elif kind == "pt":
        storable = {name: made.tensor(one) if one.dtype.kind in "iufb" else one for name, one in arrays.items()}
        data = _torch_file(storable)
    else:
        data = made.skyrl_pickle(arrays)
    _import(rng, _damaged(rng, folder / f"b.{kind}", data), format)


@cache
def _dumps():
    rng = np.random.default_rng(1)
    samples = made.slime_samples(_samples(), made.tensor)
    slots = np.stack([rng.permutation(18) % 16 for _ in range(3)])
    passes = [ids for ids, _, _ in _samples()]
    recorder = made.recorder_dump(passes, slots, made.tensor)
    lists = made.slime_samples(_samples(), np.ndarray.tolist)
    return {
        "slime": (Format.SLIME, _torch_file({"rollout_id": 1, "samples": samples})),
        "arrays": (Format.SLIME, _torch_file({"rollout_id": 1, "samples": made.slime_samples(_samples(), np.array)})),
        "lists": (Format.SLIME, _torch_file({"rollout_id": 1, "samples": lists})),
        "recorder": (Format.SGLANG_RECORDER, _torch_file(recorder)),
        "replay": (Format.MEGATRON, _torch_file([made.tensor(passes[0][:, layer]) for layer in range(3)])),
    }


def _views(rng):
    """Return values of dumps whose tensors share storages, in part or over and over."""
    whole = made.tensor(made.routes(rng, 40))
    parts = []
    for ids, _, _ in _samples():
        begin = int(rng.integers(40))
        shape = tuple(int(pick(rng, (0, 1, length, length, 2 * length))) for length in ids.shape)
        stride = pick(rng, (whole.stride(), whole.stride(), (0, 0, 0), (1, 1, 1), (2, 0, 1)))
        fits = begin * 6 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) < whole.numel()
        parts.append(whole.as_strided(shape, stride, begin * 6) if fits else whole[begin : begin + len(ids)])
    samples = made.slime_samples(_samples(), np.array)
    for sample, part in zip(samples, parts, strict=True):
        sample["rollout_routed_experts"] = part
        if rng.random() < 0.7:
            sample["tokens"] = [1] * (len(part) + 1)
    return {
        Format.SLIME: {"samples": samples * int(pick(rng, (1, 1, 30)))},
        Format.MEGATRON: [part[:, 0] for part in parts if part.shape[1]] * int(pick(rng, (1, 30))),
        Format.SGLANG_RECORDER: made.recorder_dump(
            [ids for ids, _, _ in _samples()], np.tile(np.arange(16), (3, 1)), made.tensor
        ),
    }  # fmt: skip


def _imported_slime_dumps(rng, folder):
    _imported_dumps(pick(rng, ("slime", "arrays", "lists")), rng, folder)


def shared_dumps(rng, folder):
    """Dumps whose lists, samples and tensors are one object in many places, or nested deeply."""
    format = pick(rng, (Format.SLIME, Format.SLIME, Format.MEGATRON, Format.SGLANG_RECORDER))
    value = _views(rng)[format]
    for _ in range(int(rng.integers(3))):
        value = mutate_value(rng, value)
    _import(rng, made.write(folder / "v.pt", _torch_file(value)), format)


def shared_batches(rng, folder):
    """Pickled batches with values that are shared, nested, or of other types."""
    import pickle

    batch = {
        name: {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}
        for name, array in _batches()[Format.SKYRL].items()
    }
    program = pickle.dumps({"batch_dict": mutate_value(rng, batch)}, protocol=int(rng.integers(2, 6)))
    data = b"\x80\x02cx\ny\n(cx\nz\n" + program[:-1] + b"tR."
    _import(rng, _damaged(rng, folder / "s.pkl", data, share=0.2), Format.SKYRL)


def _imported_dumps(name, rng, folder):
    format, data = _dumps()[name]
    if rng.random() < 0.5:  # in the pickle inside, so that the archive stays whole
        data = _with_damaged_pickle(rng, data)
    _import(rng, _damaged(rng, folder / "d.pt", data, share=0.3), format)


def _with_damaged_pickle(rng, data):
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", pick(rng, (0, 0, 8))) as new:
        for member in old.infolist():
            content = old.read(member)
            new.writestr(member.filename, mutate_bytes(rng, content) if member.filename.endswith("pkl") else content)
    return file.getvalue()


def imported_micro_batches(rng, folder):
    ids = [(np.concatenate([ids, ids[-1:]]).astype(np.uint8), True) for ids, _, _ in _samples()]
    data = made.prime_batches([ids[:1], ids[1:]], int(rng.integers(3)))
    _import(rng, _damaged(rng, folder / "rank_0.bin", data), Format.PRIME_RL)


def imported_router_traces(rng, folder):
    ids = [ids for ids, _, _ in _samples()]
    lines = made.megatron_lines([ids[:1], ids[1:2]]).splitlines()
    place = int(rng.integers(len(lines)))
    if rng.random() < 0.5:
        lines[place] = json.dumps(mutate_json(rng, json.loads(lines[place]))).encode()
    _import(rng, _damaged(rng, folder / "router_trace_rank0.jsonl", b"\n".join(lines)), Format.MEGATRON)


def any_pickle(rng, _):
    import pickle

    value = {"a": [1, 2.5, None, True, "x", b"y"], "b": (1, (2, 3), {4}), "c": np.arange(4), "d": np.float32(2)}
    data = pickle.dumps(value, protocol=int(rng.integers(6)))
    damaged = mutate_bytes(rng, data)
    read_pickle("pickle", io.BytesIO(damaged), len(damaged))


_OPERATIONS = (
    *(b"N", b"K\x01", b"\x8c\x01a", b"C\x01b", b")", b"]", b"}", b"\x8f", b"(", b"(", b"2"),
    *(b"2\x86", b"2\x86", b"\x85"),
    *(b"a", b"e", b"s", b"u", b"l", b"t", b"d", b"\x90", b"\x91", b"\x94", b"h\x00", b"h\x01", b"r\xff\xff\xff\xff"),
    *(b"p9223372036854775807\n", b"cx\ny\n", b"\x93", b"R", b"\x81", b"\x92", b"b", b"0", b"1", b"Q", b"o"),
    *(b"\x8a\x20" + b"\x7f" * 32, b"I99999999999999999999\n", b"\x8b\xff\xff\xff\x7f", b"\x8e" + b"\x7f" * 8),
)
"""Operations of pickles, most with their arguments."""


def built_pickle(rng, _):
    """A pickle of random operations, some of them many times: shared and deeply nested values, also as keys."""
    program = b"\x80\x04"
    for _ in range(int(rng.integers(1, 40))):
        program += pick(rng, _OPERATIONS) * int(pick(rng, (1, 1, 1, 2, 60, 5000, 300_000)) if rng.random() < 0.4 else 1)
        if len(program) > 1 << 21:
            break
    read_pickle("pickle", io.BytesIO(program + b"."), len(program))


def any_base64(rng, _):
    import base64

    data = rng.bytes(int(rng.integers(40)))
    text = mutate_bytes(rng, base64.b64encode(data)) if rng.random() < 0.7 else base64.b64encode(data)
    found = decode_base64("text", text).tobytes()
    assert found == base64.b64decode(text, validate=True)


RECORDINGS = {
    function.__name__: function
    for function in (
        *(imported_micro_batches, imported_router_traces),
        *(shared_dumps, shared_batches, any_pickle, built_pickle, any_base64),
    )
}
RECORDINGS |= {
    f"imported_answers_of_{engine}": partial(_imported_answers, engine)
    for engine in ("vllm", "sglang", "skyrl_and_prime", "nemo_gym", "megatron")
}
RECORDINGS |= {
    f"imported_batches_of_{format.name.lower()}": partial(_imported_batches, format)
    for format in (Format.VERL, Format.SKYRL, Format.NEMO_RL)
}
RECORDINGS |= {
    "imported_dumps_of_slime": _imported_slime_dumps,
    "imported_dumps_of_sglang": partial(_imported_dumps, "recorder"),
    "imported_dumps_of_megatron": partial(_imported_dumps, "replay"),
}
