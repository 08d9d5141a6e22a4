"""`ExpertShape`: the sizes of one expert, and those of known models."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from relibra.errors import ConfigError

GradientWire = Literal["model", "float32"]
"""Type in which the gradient of a replica travels home: that of the weights, or float32."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Size of one expert: `matrices` matrices of hidden x width values (3: gate, up and down; 2: up and down).

    adapter_rank   of the low-rank adapters that are trained in its place; 0: it is trained itself
    raises    ConfigError for sizes out of 1 to 2^30; a rank may be 0
    """

    hidden: int
    width: int
    matrices: int = 3
    bytes_per_value: int = 2
    adapter_rank: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes out of range."""
        for name, value in asdict(self).items():
            least = 0 if name == "adapter_rank" else 1
            if not least <= value <= 1 << 30:
                raise ConfigError(f"expert {name} is {value}: allowed are {least} to 2^30")

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        return self.matrices * self.hidden * self.width

    @property
    def adapter_parameters(self) -> int:
        """Return the number of values in adapters; gate and up share the one that reads the hidden state."""
        return self.adapter_rank * (2 * self.hidden + self.matrices * self.width)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights, and of adapters, in the type of computation."""
        return (self.parameters + self.adapter_parameters) * self.bytes_per_value

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of the gradient, fp32."""
        return (self.adapter_parameters or self.parameters) * 4

    def returned_bytes(self, wire: GradientWire) -> int:
        """Return the bytes of a gradient on its way home."""
        return self.gradient_bytes * (self.bytes_per_value if wire == "model" else 4) // 4

    @property
    def state_bytes(self) -> int:
        """Return the bytes that move with an expert: weights, fp32 master, Adam moments; 14 per parameter in bf16."""
        return self.weight_bytes + self.gradient_bytes * 3

    @property
    def flops_per_token_slot(self) -> int:
        """Return the forward flops of one token: two per weight. Backward takes twice as many."""
        return 2 * (self.parameters + self.adapter_parameters)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token's hidden state in an exchange."""
        return self.hidden * self.bytes_per_value


EXPERT_SHAPES = {
    "qwen3-30b-a3b": ExpertShape(hidden=2048, width=768),
    "qwen3-235b-a22b": ExpertShape(hidden=4096, width=1536),
    "glm4.5-106b-a12b": ExpertShape(hidden=4096, width=1408),
    "deepseek-v3": ExpertShape(hidden=7168, width=2048),
    "deepseek-v2-lite": ExpertShape(hidden=2048, width=1408),
    "gpt-oss-20b": ExpertShape(hidden=2880, width=2880),
    "mixtral-8x7b": ExpertShape(hidden=4096, width=14336),
}
"""Routed experts of known models, from their published `config.json`."""


def expert_shape(name: str) -> ExpertShape:
    """Return the shape of a known model's experts.

    raises    ConfigError for an unknown name
    """
    if name not in EXPERT_SHAPES:
        raise ConfigError(
            f"expert shape {name!r} is unknown: allowed are {', '.join(EXPERT_SHAPES)}; "
            "for another model give ExpertShape(hidden=..., width=...)"
        )
    return EXPERT_SHAPES[name]
