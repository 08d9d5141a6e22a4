"""`SamplerWatch`: the check of the sampler in a step, on the first mini-batch before the optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from relibra.errors import EngineError
from relibra.rl.batch.training_batch import TrainingBatch
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.policy import Policy
from relibra.rl.run.ranks import sum_over_ranks
from relibra.rl.update.recompute import PassScores
from relibra.routing.sampler_check import SampledTokens, SamplerHistory, SamplerVerdict, check_sampler, sampler_sums

_log = logging.getLogger(__name__)


class SamplerWatch:
    """Compares a step's tokens with those of accepted steps, and does what `update.on_mismatch` says.

    verdict   of the step; None: nothing checked (a pass made the old log-probs, or older weights sampled all tokens)
    state     history as JSON data, with this step once it is accepted; None: no step yet
    """

    def __init__(self, step: int, policy: Policy, config: RunConfig, state: Mapping[str, Any] | None) -> None:
        """Start with the history that the step before left."""
        self.verdict: SamplerVerdict | None = None
        self.state, self._step, self._policy, self._config = state, step, policy, config
        given = (config.parallel.ranks, config.rollout.url, config.rollout.transfer, config.plan.balancer)
        passes = (config.plan.sums, config.update.micro_batch_tokens, config.update.shared_prompts)
        self._rounding = str((*given, *passes))  # where a resumed run rounds otherwise, a new history begins

    def accepts(self, scored: PassScores | None, batch: TrainingBatch) -> bool:
        """Return whether old log-probs may be the sampler's; collective.

        raises    EngineError with `update.on_mismatch` "stop" where tokens are not like those of steps before
        """
        if scored is None:
            return True
        own = sampler_sums(self._tokens(scored, batch))
        sums = own.shaped(sum_over_ranks(torch.from_numpy(own.flat())).numpy())
        if not sums.tokens_4[0]:
            return True
        known = self.state is not None and self.state["rounding"] == self._rounding
        history = SamplerHistory.from_state(self.state["steps"]) if self.state and known else SamplerHistory()
        self.verdict = check_sampler(sums, history, layer_ids=self._policy.layer_ids)
        if self.verdict.accepted:
            self.state = {"rounding": self._rounding, "steps": history.with_step(sums).as_state()}
            return True
        uses_sampler = self._config.algorithm.old_log_probs == "sampler"
        reaction = self._config.update.on_mismatch or ("fall_back" if uses_sampler else "warn")
        if reaction == "stop":
            raise EngineError(
                f"step {self._step}: {self.sentence}; look at what it names, or set update.on_mismatch=warn"
            )
        if dist.get_rank() == 0:
            _log.warning("step %d: %s", self._step, self.sentence)
        return reaction != "fall_back"

    @property
    def sentence(self) -> str:
        """What differs, in a sentence; "": nothing."""
        return self.verdict.sentence if self.verdict else ""

    def metrics(self) -> dict[str, Any] | None:
        """Return the verdict for the row of a step; None: nothing was checked."""
        return None if self.verdict is None else {**asdict(self.verdict), "differs": list(self.verdict.differs)}

    def _tokens(self, scored: PassScores, batch: TrainingBatch) -> SampledTokens:
        """Return this rank's scored tokens that the weights of this step sampled; a rank may have none."""
        layers = len(self._policy.layer_ids)
        choices = self._policy.top_k if self._config.algorithm.replay == "R3" else 0
        pieces, responses = list[dict[str, Tensor]](), 0
        for number, (scores, read) in scored.found.items():
            now_X = read.in_window_X & (read.versions_X == self._step)  # older ones differ by what was learned since
            if self._config.rollout.keeps_cache:  # so do those sampled over older keys and values
                one_window_B = torch.tensor(
                    [batch.responses[s].windows == 1 for s in read.samples_B.tolist()], dtype=torch.bool
                )
                now_X = now_X & one_window_B[read.response_X]
            tokens, routes = read.of_tokens(now_X), batch.micro_batches[number].routes
            none_XLK = torch.zeros(len(tokens.row_X), layers, choices, dtype=torch.uint8)  # filler, or no replay
            pieces.append(
                {
                    "log_ratio_X": scores.log_probs_X[now_X] - tokens.sampled_log_probs_X,
                    "response_X": tokens.response_X + responses,
                    "position_X": tokens.position_1T[0, tokens.row_X],
                    "age_X": self._step - tokens.versions_X,  # all 0
                    "experts_XLK": none_XLK if routes is None else routes.experts_TLK[tokens.row_X],
                }
            )
            responses += tokens.num_responses
        return SampledTokens(
            **{name: torch.cat([one[name] for one in pieces]).numpy() for name in pieces[0]},
            server_S=np.zeros(responses, dtype=np.int64),
            num_servers=1,  # responses do not say which server sampled them
            num_experts=self._policy.num_experts,
        )
