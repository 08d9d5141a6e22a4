"""`ActivationChoice`: what each layer keeps of its forward pass. Imports no numba: a launcher reads estimates."""

from __future__ import annotations

from dataclasses import dataclass

OPTIONS = RECOMPUTE, ATTENTION, ALL = ("recompute", "attention", "all")
"""What a layer keeps: nothing but its input; all but what its routed experts need, whose rows are sent again; all."""


@dataclass(frozen=True, kw_only=True)
class ActivationChoice:
    """What each layer keeps, by name.

    nbytes      kept at most on a rank in a micro-batch, beside what recomputing every layer takes
    seconds     that a step is faster than by recomputing every layer
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
        """Return it and the runner-up in a line."""
        layers = ", ".join(f"{name} {number} layers" for name, number in self.layers.items())
        line = f"{layers} (+{self.nbytes / 2**30:.2f} GiB, -{self.seconds:.3g} s a step)"
        return f"activations: {line}; next best {self.runner_up}" if self.runner_up else line
