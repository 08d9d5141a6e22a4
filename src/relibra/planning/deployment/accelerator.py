"""`Accelerator`: one GPU as a deployment search sees it, with price and power; those of MegaScale-Infer's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from pydantic import Field

from relibra.errors import ConfigError
from relibra.field_checks import build, check_fields
from relibra.files import read_toml

_LONGEST_NAME = 64
"""Characters of an unknown name that are compared with known ones."""
NODE_SIZES = (1, 2, 4, 8)
"""Allowed numbers of accelerators in a node, and of those in it that share a layer by tensor parallelism."""
Amount = Annotated[int | float, Field(gt=0, lt=1e24)]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU.

    price                       per GPU and unit of time, in any unit that all accelerators of a search share
    memory_bytes                device memory
    memory_bytes_per_second     of the device memory
    flops_per_second            dense bf16, peak
    network_bytes_per_second    its NIC, each direction
    peer_bytes_per_second       to the other GPUs of its node, for tensor parallelism
    watts                       most power
    node_size                   GPUs of a node
    raises                      ConfigError for values out of range
    """

    name: str
    price: Amount
    memory_bytes: Amount
    memory_bytes_per_second: Amount
    flops_per_second: Amount
    network_bytes_per_second: Amount
    peer_bytes_per_second: Amount
    watts: Amount
    node_size: int = 8

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        if not self.name or not self.name.isprintable():
            raise ConfigError(f"accelerator name is {self.name!r}: it must be one line of printable text")
        check_fields(Accelerator, vars(self), f"accelerator {self.name!r}", ConfigError)
        if self.node_size not in NODE_SIZES:
            raise ConfigError(f"accelerator {self.name!r}: node_size is {self.node_size}: allowed are {NODE_SIZES}")


def _of_table(
    name: str, price: int | float, gigabytes: int | float, gb_per_second: int | float, tflops: int | float,
    network: int | float, peer: int | float, watts: int | float,
) -> Accelerator:  # fmt: skip
    return Accelerator(
        name=name,
        price=price,
        memory_bytes=gigabytes * 1e9,
        memory_bytes_per_second=gb_per_second * 1e9,
        flops_per_second=tflops * 1e12,
        network_bytes_per_second=network * 1e9,
        peer_bytes_per_second=peer * 1e9,
        watts=watts,
    )


ACCELERATORS = {
    one.name: one
    for one in (
        _of_table("l20", 1.00, 48, 864.0, 119.5, 12.5, 25.0, 275.0),
        _of_table("h800", 5.28, 80, 3430.4, 989.0, 25.0, 200.0, 700.0),
        _of_table("a800", 2.26, 80, 2039.0, 312.0, 25.0, 200.0, 400.0),
        _of_table("h20", 1.85, 96, 4096.0, 148.0, 25.0, 450.0, 500.0),
        _of_table("l40s", 1.08, 48, 864.0, 362.0, 12.5, 25.0, 350.0),
    )
}
"""Price (L20 = 1), memory, bandwidth and flops: MegaScale-Infer (arXiv 2504.02263), table 3; watts of H20 and L40S too.
Network per GPU, links inside a node and the other watts are ours, from data sheets."""


def accelerator(name: str, more: Mapping[str, Accelerator] | None = None) -> Accelerator:
    """Return a known accelerator; upper and lower case are the same.

    more      accelerators beside `ACCELERATORS`, or instead of one of them, by lower-case name
    raises    ConfigError for an unknown name
    """
    known = {**ACCELERATORS, **(more or {})}
    if name.lower() not in known:
        near = get_close_matches(name.lower()[:_LONGEST_NAME], known, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(
            f"accelerator {name!r} is unknown{meant}: allowed are {', '.join(known)}, or those of a TOML file that you "
            "name"
        )
    return known[name.lower()]


def read_accelerators(path: Path | str) -> dict[str, Accelerator]:
    """Return the accelerators of a TOML file: a table per accelerator, whose keys are the fields of `Accelerator`.

    raises    ConfigError when the file cannot be read, or a table is not an accelerator
    """
    found = {}
    for name, table in read_toml(Path(path), ConfigError, "a TOML file of accelerators").items():
        given = {"name": name.lower(), **table} if isinstance(table, dict) else table
        found[name.lower()] = build(Accelerator, given, f"{path}: [{name}]", ConfigError)
    return found
