"""Steps prepared while those before them train (`rollout.ahead`): responses sampled, rated, and planned.

Three threads of a rank, each with what the others never do:

    training    updates, and at each update of the weights stops the sampler's requests (`rollout/engines.py`)
    preparing   this file: begins the responses of steps, waits for them in order, and prepares each step as `rl_step`
                does without `ahead`; its collectives run in a group of their own, in the same order on every rank
    sampler     talks to servers (`rollout/served/sampler.py`)

Step `s` begins when the weights have version `s - ahead` or later (`_may_begin`), so no token is older than `ahead`
steps, and none is dropped. What is under way is not in a checkpoint: a resumed run samples it again, from the samples
that the checkpoint counts as not begun.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch

from relibra.planning.balancers.lasting import with_residents
from relibra.rl.batch.step_plan import exchange_residents
from relibra.rl.batch.training_batch import homes_at
from relibra.rl.rollout.admission import SampleCursor
from relibra.rl.rollout.collect import Rollout, admit_responses, response_starter
from relibra.rl.rollout.response import Response
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.sampler import Sampled
from relibra.rl.run.ranks import collectives_in, largest_over_ranks, open_group
from relibra.rl.run.step_trace import StepTraces
from relibra.rl.step import Learner, PreparedStep, Progress, homes_before, prepare_step
from relibra.rl.stopwatch import Stopwatch


@dataclass(frozen=True, kw_only=True)
class _BegunStep:
    """A step whose responses are being sampled.

    active    responses of this rank, as they were when the step began
    cursor    samples that begin after those of this step
    """

    step: int
    active: list[Response]
    cursor: SampleCursor
    sampled: Sampled


class StepsAhead:
    """Prepares steps in a thread; its methods are for the thread that trains, and every rank calls them alike."""

    def __init__(self, learner: Learner, traces: StepTraces, progress: Progress, step: int) -> None:
        """Begin with the step that trains next; collective.

        progress   before that step; servers have the weights of version `step`
        """
        assert isinstance(learner.engine, ServerEngine), "the settings refuse another"
        assert learner.engine.sampler is not None, "make_engine made one"
        self._learner, self._config, self._traces = learner, learner.config, traces
        self._sampler = learner.engine.sampler
        self._start = response_starter(learner.task, learner.tokenizer, self._config.rollout)
        self._live: Sequence[Response] = progress.live
        self._cursor, self._homes = progress.cursor, homes_before(learner, progress)
        self._residents: Callable[[], list | None] = lambda: None
        self._version, self._next, self._closing = step, step, False
        self._error: BaseException | None = None
        self._begun = deque[_BegunStep]()
        self._prepared: dict[int, Future[PreparedStep]] = {s: Future() for s in range(step, self._config.run.steps)}
        self._changed, self._group = threading.Condition(), open_group()
        self._thread = threading.Thread(target=self._run, name="steps ahead", daemon=True)
        self._thread.start()

    def advance(self, version: int) -> None:
        """Tell the thread which version of the weights servers have now: further steps may begin."""
        with self._changed:
            self._version = version
            self._changed.notify()

    def take(self, step: int, clock: Stopwatch) -> PreparedStep:
        """Wait for a step to be prepared; collective, as ranks wait for one another in the thread.

        The wait counts as "rollout" until all responses are whole, then as "plan".

        raises    what went wrong in the thread or the sampler, such as EngineError
        """
        began = time.perf_counter()
        with clock.stage("rollout"):
            prepared = self._prepared[step].result()
            del self._prepared[step]
        waited = time.perf_counter() - began
        sampling = min(max(0.0, prepared.sampled_at - began), waited)
        clock.seconds |= {"rollout": sampling, "plan": waited - sampling}
        return replace(prepared, begun_ahead=self._cursor.started - prepared.rollout.cursor.started)

    def close(self) -> None:
        """End the thread, and give up what is under way; collective.

        raises    what ended the thread before
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(next(self._learner.policy.trained.parameters()).device)
            with collectives_in(self._group):
                while self._goes_on():
                    pass
        except BaseException as error:  # noqa: BLE001 - raised by `take` and `close`
            self._error = error
            for prepared in self._prepared.copy().values():
                if not prepared.done():
                    prepared.set_exception(error)

    def _goes_on(self) -> bool:
        """Begin a step or prepare one, as soon as either can be done; return whether there is more to do.

        Ranks see versions and the closing in the same order, and begin all that they may before they prepare or close:
        so their collectives have one order.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._may_begin() or self._is_sampled() or self._closing)
            begins, sampled = self._may_begin(), self._is_sampled()
        if begins:
            self._begin()
            return True
        if largest_over_ranks(not sampled):  # a rank closes
            return False
        step = self._begun[0].step
        self._prepared[step].set_result(self._prepare(self._begun[0]))
        self._begun.popleft()
        return step + 1 < self._config.run.steps

    def _may_begin(self) -> bool:
        windowed = self._config.rollout.window_tokens < self._config.rollout.max_response
        limit = min(self._version + self._config.rollout.ahead, self._config.run.steps - 1)
        return self._next <= limit and not (windowed and self._begun)  # a window needs the one before

    def _is_sampled(self) -> bool:
        return bool(self._begun) and self._begun[0].sampled.done()

    def _begin(self) -> None:
        settings = self._config.rollout
        active, self._cursor = admit_responses(self._live, self._cursor, self._start, settings)
        limits = [min(settings.window_tokens, settings.max_response - response.length) for response in active]
        sampled = self._sampler.begin(active, limits)
        self._begun.append(_BegunStep(step=self._next, active=active, cursor=self._cursor, sampled=sampled))
        self._next += 1
        sampled.add_done_callback(lambda _: self._tell())

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify()

    def _prepare(self, begun: _BegunStep) -> PreparedStep:
        """Return a step whose responses are whole; collective."""
        windows, cost = begun.sampled.result()
        longest = self._config.rollout.max_response
        responses = [
            response.extended(window, weight_version=begun.step, max_response=longest)
            for response, window in zip(begun.active, windows, strict=True)
        ]
        windows.clear()  # they hold the routes too
        rollout = Rollout(responses=responses, cost=cost, cursor=begun.cursor)
        homes, residents = self._homes, self._residents()
        if homes is not None and residents is not None:
            homes = with_residents(homes, residents)
        prepared = prepare_step(self._learner, rollout, homes, self._traces, Stopwatch(begun.step))
        self._live = [response for response in prepared.rollout.responses if response.finish_reason is None]
        if (plan := prepared.batch.plan) is not None:
            learner = self._learner
            self._homes = homes_at(plan.physical_to_logical_map, learner.policy, learner.cluster.topology)
            if self._config.plan.lasting:  # waited for when they are needed, so that this step does not wait
                self._residents = partial(exchange_residents, prepared.batch.lasting)
        return prepared
