"""Damage to bytes, to JSON values and to arrays; each follows from the random numbers alone."""

import copy
import json

import numpy as np

NUMBERS = (0, 1, -1, 2, 3, 7, 255, 256, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 10**30)
OTHERS = (
    *(1.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), True, False, None),
    *("", "x", "\x1b[2J", "\u2028", "\ud800", "../../x", "x" * 3000, "9" * 400, [], {}, [[]], {"": {}}, [None] * 100),
)


def pick(rng, choices):
    """Return one of a sequence, as it is."""
    return choices[int(rng.integers(len(choices)))]


def mutate_bytes(rng, data):
    """Return bytes with one to four changes: bits, bytes, cuts, insertions, repetitions, numbers, brackets."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        place = int(rng.integers(len(data) + 1))
        length = int(rng.integers(1, 64))
        match int(rng.integers(9)):
            case 0 if data:
                data[place % len(data)] ^= 1 << int(rng.integers(8))
            case 1 if data:
                data[place % len(data)] = int(rng.integers(256))
            case 2:
                del data[place:]
            case 3:
                del data[place : place + length]
            case 4:
                data[place:place] = rng.bytes(length)
            case 5:
                data[place:place] = data[place : place + length] * int(rng.integers(1, 20))
            case 6:
                data[place : place + 8] = int(pick(rng, NUMBERS) % 2**64).to_bytes(8, "little")
            case 7:
                data[place:place] = pick(
                    rng, (b"[", b"{", b'"', b"\n", b"\r", b"\xff", b"[" * 5000, b"9" * 5000, b"\0")
                )
            case _:
                digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
                if digits:
                    i = pick(rng, digits)
                    data[i : i + 1] = str(pick(rng, NUMBERS)).encode()
    return bytes(data)


def mutate_json(rng, value):
    """Return a JSON value in which one to three nodes are other values, missing, or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(int(rng.integers(1, 4))):
        value = _with_change(rng, value)
    return value


def _with_change(rng, value):
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = pick(rng, list(keys))
        match int(rng.integers(6)):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[pick(rng, ("", "x", "__class__", f"{key}s"))] = value.pop(key)
            case _:
                value[key] = _with_change(rng, value[key])
        return value
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
        return value + int(rng.integers(-3, 4)) if rng.random() < 0.5 else pick(rng, NUMBERS)
    if rng.random() < 0.1:
        return _deep(int(rng.integers(2, 400)))
    return copy.deepcopy(pick(rng, (*NUMBERS, *OTHERS)))  # later changes are of this value alone


def _deep(levels, value=None):
    value = [] if value is None else value
    for _ in range(levels):
        value = [value]
    return value


def share(rng, value, times=40):
    """Return a value that a pickle writes in a few bytes and that is walked through in up to 2^times steps."""
    for _ in range(int(rng.integers(1, times))):
        value = pick(rng, ((value,) * 2, [value] * 2, [value] * 300, {"a": value, "b": value}, (value, [value])))
    return value


def mutate_value(rng, value):
    """Return a value of lists and dictionaries in which one node is shared, nested, another one, or there again."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        value = copy.copy(value)
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key, other = pick(rng, list(keys)), pick(rng, list(keys))
        match int(rng.integers(8)):
            case 0:
                value[key] = value[other]
            case 1 if isinstance(value, list):
                value += [value[key]] * int(rng.integers(1, 300))
            case 2 if isinstance(value, dict):
                value[pick(rng, (*NUMBERS, (1, 2), None))] = value[key]
            case _:
                value[key] = mutate_value(rng, value[key])
        return value
    match int(rng.integers(4)):
        case 0:
            return share(rng, pick(rng, (value, 1, (), [], "x")))
        case 1:
            return _deep(int(rng.integers(2, 200)), value)
        case 2:
            return [pick(rng, NUMBERS)] * int(rng.integers(1000))
    return copy.deepcopy(pick(rng, (*NUMBERS, *OTHERS)))


def mutate_array(rng, array):
    """Return an array with other entries, another type, another shape, or other axes."""
    array = np.array(array)
    match int(rng.integers(6)):
        case 0 | 1 if array.size:
            flat = array.reshape(-1).copy()
            low, high = (np.iinfo(array.dtype).min, np.iinfo(array.dtype).max) if array.dtype.kind in "iu" else (0, 1)
            flat[int(rng.integers(array.size))] = min(max(pick(rng, NUMBERS), low), high)
            return flat.reshape(array.shape)
        case 2:
            numbers = (np.int8, np.uint16, np.int64, np.float32, np.float64, np.bool_, np.uint64, np.complex64)
            kinds = (*numbers, "U3", "M8[s]") if array.dtype.kind in "iufb" else ("U3", "S2")
            return array.astype(pick(rng, kinds), casting="unsafe")
        case 3 if array.ndim:
            return array[: int(rng.integers(len(array) + 1))]
        case 4 if array.ndim:
            shape = [0 if rng.random() < 0.5 else length for length in array.shape]
            return np.zeros(shape, array.dtype)
        case 5 if array.ndim:
            return np.repeat(array, int(rng.integers(1, 300)), axis=int(rng.integers(array.ndim)))
    return array[None] if rng.random() < 0.5 else array.reshape(-1)
