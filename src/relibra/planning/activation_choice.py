"""`ActivationChoice`: what each layer keeps of its forward pass. Imports no numba: a launcher loads it fast."""

from __future__ import annotations

from dataclasses import dataclass

OPTIONS = RECOMPUTE, ATTENTION, ALL = ("recompute", "attention", "all")
"""What a layer keeps: its input alone; all but what its routed experts need, as their rows are sent again; all."""


@dataclass(frozen=True, kw_only=True)
class ActivationChoice:
    """What each layer keeps, by name.

    nbytes      most bytes kept on a rank in a micro-batch, beyond what recomputing every layer keeps
    seconds     that a step is faster than with every layer recomputed
    runner_up   the next best that differs; None: there is nothing else
    """

    option_L: tuple[str, ...]
    nbytes: float
    seconds: float
    runner_up: ActivationChoice | None = None

    @property
    def layers(self) -> dict[str, int]:
        """Return how many layers have each option."""
        return {name: self.option_L.count(name) for name in dict.fromkeys(self.option_L)}

    def __str__(self) -> str:
        """Return this choice and the runner-up in a line."""
        layers = ", ".join(f"{name} {number} layers" for name, number in self.layers.items())
        line = f"{layers} (+{self.nbytes / 2**30:.2f} GiB, -{self.seconds:.3g} s a step)"
        return f"activations: {line}; next best {self.runner_up}" if self.runner_up else line
