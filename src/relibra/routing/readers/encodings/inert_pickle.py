"""Read pickles without running anything that they name.

A pickle is a program that builds values by calling functions of any module. Here numbers, texts, bytes, lists, tuples,
dictionaries and sets are built; wherever a function would be called, an `InertObject` holds its name and its arguments.
Readers of formats take arrays out of these (`torch_archive.as_array`). So a file can lie, but not act.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from relibra.errors import TraceError
from relibra.routing.readers.encodings.excerpts import excerpt

FREE_BYTES = 1 << 30
"""Values of any pickle may take so much memory; those of a large file also twice its size. Empty lists take 64 bytes
for each byte of the pickle, numbers 8 to 40."""
PAIR_BYTES, OBJECT_BYTES, POINTER_BYTES, COLLECTED_BYTES = 104, 320, 8, 16
"""Memory of an entry of a dictionary, an `InertObject`, a place in a list, and what the garbage collector adds."""
_LITERALS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8", "FLOAT", "BINFLOAT",
}  # fmt: skip


@dataclass(eq=False, repr=False, slots=True)
class InertObject:
    """What a pickle would have made by a call.

    name     module and name of the function or class, "torch._utils._rebuild_tensor_v2"
    args     arguments of the call; () for a bare name
    state    what the pickle would have restored into the object; None: nothing
    items    entries that it would have set
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class StorageName:
    """A persistent id: data that lies outside of the pickle, under this id."""

    id: Any


_MARK = object()
"""The place on the stack where the values of a container begin."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}


def read_pickle(where: str, file: Any, payload_bytes: int) -> Any:
    """Return the value of a pickle, with `InertObject`s in place of calls.

    Keys of dictionaries and members of sets that are neither numbers nor texts become `InertObject`s: the hash of a
    tuple walks through all that it holds.

    file            open for reading bytes
    payload_bytes   size of the file that is the pickle, or holds it
    raises          TraceError for damaged bytes, for out-of-band buffers, and for values that take more memory than
                    `FREE_BYTES` and twice the payload
    """
    try:
        return _Machine(FREE_BYTES + 2 * payload_bytes).run(pickletools.genops(file))
    except TraceError as error:
        raise TraceError(f"{where} cannot be read as a pickle: {error}") from error
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise TraceError(f"{where} cannot be read as a pickle: damaged ({type(error).__name__}: {error})") from error


class _Machine:
    """The stack machine of pickles, without calls."""

    def __init__(self, limit: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.limit, self.used = limit, 0

    def run(self, operations: Iterator[tuple[Any, Any, int | None]]) -> Any:
        """Return the value that the operations leave."""
        stack = self.stack
        for operation, argument, _ in operations:
            name = operation.name
            if name in _LITERALS:
                self.use(sys.getsizeof(argument) + POINTER_BYTES)
                stack.append(argument)
            elif name in _CONSTANTS:
                self.use(POINTER_BYTES)
                stack.append(_CONSTANTS[name])
            elif name == "STOP":
                return stack.pop()
            else:
                self.step(name, argument)
        raise TraceError("it has no end")

    def step(self, name: str, argument: Any) -> None:
        """Do one operation."""
        stack = self.stack
        match name:
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.remember(argument)
            case "MEMOIZE":
                self.remember(len(self.memo))
            case "GET" | "BINGET" | "LONG_BINGET":
                self.use(POINTER_BYTES)
                stack.append(self.memo[argument])
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_SET" | "EMPTY_TUPLE":
                self.made({"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}[name]())
            case "LIST":
                self.made(self.since_mark())
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.made(tuple(self.since_mark() if name == "TUPLE" else self.taken(int(name[-1]))))
            case "DICT":
                pairs = self.since_mark()
                self.made({})
                self.set_items(pairs)
            case "FROZENSET":
                self.made(frozenset(map(self.as_key, self.since_mark())))
            case "APPEND" | "APPENDS":
                values = self.taken(1) if name == "APPEND" else self.since_mark()
                self.use(POINTER_BYTES * len(values))
                if isinstance(stack[-1], list):
                    stack[-1].extend(values)
                elif not isinstance(stack[-1], InertObject):  # of a class of lists, whose values nothing reads
                    raise TraceError("it appends to what is no list")
            case "SETITEM" | "SETITEMS":
                self.set_items(self.taken(2) if name == "SETITEM" else self.since_mark())
            case "ADDITEMS":
                members = self.since_mark()
                if not isinstance(stack[-1], set):
                    raise TraceError("it adds to what is no set")
                self.use(PAIR_BYTES * len(members))
                stack[-1].update(map(self.as_key, members))
            case "POP":
                stack.pop()
            case "POP_MARK":
                self.since_mark()
            case "DUP":
                self.use(POINTER_BYTES)
                stack.append(stack[-1])
            case "GLOBAL":
                self.made(InertObject(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                module, function = self.taken(2)
                if not isinstance(module, str) or not isinstance(function, str):
                    raise TraceError(f"it names {excerpt(function)} of {excerpt(module)}: expected texts")
                self.made(InertObject(f"{module}.{function}"))
            case "REDUCE" | "NEWOBJ":
                self.called(*self.taken(2))
            case "NEWOBJ_EX" | "OBJ":
                function, *arguments = self.taken(3) if name == "NEWOBJ_EX" else self.since_mark()
                self.called(function, tuple(arguments))
            case "INST":
                self.called(InertObject(argument.replace(" ", ".")), tuple(self.since_mark()))
            case "BUILD":  # the state of an object
                target, state = self.taken(2)
                if isinstance(target, InertObject):
                    target.state = state
                stack.append(target)
            case "PERSID" | "BINPERSID":
                self.made(StorageName(argument if name == "PERSID" else self.taken(1)[0]))
            case "PROTO" | "FRAME":
                pass
            case _:
                raise TraceError(f"its operation {name} is not supported")

    def use(self, size: int) -> None:
        """Count memory that values take."""
        self.used += size
        if self.used > self.limit:
            raise TraceError(f"its values take more than {self.limit:,} bytes of memory")

    def made(self, value: Any) -> None:
        """Push a container."""
        is_object = isinstance(value, InertObject | StorageName)
        self.use(OBJECT_BYTES if is_object else sys.getsizeof(value) + COLLECTED_BYTES + POINTER_BYTES)
        self.stack.append(value)

    def called(self, function: Any, arguments: Any) -> None:
        """Push what a call would have made."""
        name = function.name if isinstance(function, InertObject) else type(function).__name__
        self.made(InertObject(name, arguments if isinstance(arguments, tuple) else (arguments,)))

    def since_mark(self) -> list[Any]:
        """Take the values behind the last mark off the stack."""
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise TraceError("it takes values from an empty stack")

    def taken(self, count: int) -> list[Any]:
        """Take values off the stack."""
        values = self.stack[len(self.stack) - count :]
        if len(values) < count or any(value is _MARK for value in values):
            raise TraceError("it takes values from an empty stack")
        del self.stack[len(self.stack) - count :]
        return values

    def remember(self, key: int) -> None:
        """Store the value on top of the stack in the memo."""
        if not 0 <= key < 1 << 32:  # larger numbers may share one hash
            raise TraceError(f"it names a value {excerpt(key)}: expected a number of 32 bits")
        self.use(PAIR_BYTES)
        self.memo[key] = self.stack[-1]

    def set_items(self, pairs: list[Any]) -> None:
        """Set entries of the dictionary on top of the stack."""
        target = self.stack[-1]
        entries = target.items if isinstance(target, InertObject) else target
        if not isinstance(entries, dict) or len(pairs) % 2:
            raise TraceError("it sets entries of what is no dictionary")
        self.use(PAIR_BYTES * (len(pairs) // 2))
        entries.update(zip(map(self.as_key, pairs[::2]), pairs[1::2], strict=True))

    def as_key(self, value: Any) -> Any:
        """Return a key whose hash is fast and rarely that of another: the value itself, or an object that holds it."""
        is_plain = isinstance(value, str | bytes | float | InertObject | StorageName | None)
        if is_plain or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63):
            return value
        self.use(OBJECT_BYTES)
        return InertObject("a key", (value,))
