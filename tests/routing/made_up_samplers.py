"""Steps of tokens that bfloat16 servers might have sampled: heavy-tailed rounding that depends on prompt and expert."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from relibra.routing.sampler_check import SampledTokens

RARE = 41
"""An expert of layer 1 that a thousandth of the tokens use."""


@dataclass
class Sampler:
    """Draws steps of responses in groups of 16, which one of the servers samples together.

    tokens       mean length of a response
    noise        size of log-ratios of a usual token
    """

    seed: int = 0
    responses: int = 256
    servers: int = 8
    tokens: float = 250.0
    longest: int = 2000
    layers: int = 4
    experts: int = 128
    top_k: int = 8
    noise: float = 5e-3
    rng: np.random.Generator = field(init=False)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.of_expert_E = self.rng.lognormal(0, 0.3, self.experts)
        self._routes_XLK = None

    def step(self) -> SampledTokens:
        rng, S = self.rng, self.responses
        group_S = np.arange(S) // 16
        length_S = np.clip(rng.lognormal(np.log(self.tokens) - 0.3, 0.8, S), 1, self.longest).astype(int)
        response_X = np.repeat(np.arange(S), length_S)
        X = len(response_X)
        position_X = np.concatenate([np.arange(length) for length in length_S])
        experts_XLK = self._draw_routes(X)
        scale_S = rng.lognormal(0, 0.2, S) * rng.lognormal(0, 0.2, S // 16 + 1)[group_S] * rng.lognormal(0, 0.1)
        scale_X = self.noise * scale_S[response_X] * rng.lognormal(0, 1.0, X)
        if self.layers:
            scale_X *= self.of_expert_E[experts_XLK[:, 0, 0]]
        return SampledTokens(
            log_ratio_X=(scale_X * rng.standard_normal(X)).astype(np.float32),
            response_X=response_X,
            position_X=position_X,
            age_X=np.zeros(X, dtype=int),
            server_S=rng.permutation(S // 16 + 1)[group_S] % self.servers,
            num_servers=self.servers,
            experts_XLK=experts_XLK,
            num_experts=self.experts,
        )

    def _draw_routes(self, X):
        """Return choices, some experts more often than others; from one large draw, which costs less."""
        if self._routes_XLK is None:
            shape = (int(self.responses * self.tokens * 2), self.layers, self.top_k)
            draw = self.rng.random(shape) ** 1.5 * (self.experts - 1)
            self._routes_XLK = draw.astype(np.uint8)
            if self.layers > 1:
                layer_XK = self._routes_XLK[:, 1]
                layer_XK[layer_XK == RARE] = RARE + 1
                layer_XK[self.rng.random(len(layer_XK)) < 1e-3, 0] = RARE
        start = int(self.rng.integers(0, max(1, len(self._routes_XLK) - X)))
        routes_XLK = self._routes_XLK[start : start + X]
        return routes_XLK if len(routes_XLK) == X else np.resize(self._routes_XLK, (X, self.layers, self.top_k))


def uses_rare_expert(tokens: SampledTokens):
    return (tokens.experts_XLK[:, 1] == RARE).any(axis=1)


def disturbed(tokens: SampledTokens, chosen_X, sd: float, seed: int = 0) -> SampledTokens:
    """Return the tokens with more noise where they are chosen."""
    noise_X = np.random.default_rng(seed).normal(0, sd, len(tokens.log_ratio_X))
    return replace(tokens, log_ratio_X=tokens.log_ratio_X + np.where(chosen_X, noise_X, 0.0))
