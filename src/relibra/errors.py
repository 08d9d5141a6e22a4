"""What can go wrong for a user, as one small tree.

    RelibraError
      TraceError     a routing trace is damaged, incomplete, or does not fit the model or the batch
      PlanError      a plan breaks a rule, or cannot be made under the given budget
      ConfigError    a setting is unknown, out of range, or contradicts another one
      ClusterError   a cluster description is impossible, or does not fit the job
      EngineError    a rollout engine, a model or a process did something we cannot go on from

Each message is one sentence: what, where, got, allowed, next step. Broken beliefs about our own code are `assert`s.
"""


class RelibraError(Exception):
    """Root of every error that relibra raises on purpose."""


class TraceError(RelibraError, ValueError):
    """A routing trace is damaged, incomplete, or does not fit the model or the batch."""


class PlanError(RelibraError, ValueError):
    """A plan breaks a rule, or cannot be made under the given budget."""


class ConfigError(RelibraError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class ClusterError(RelibraError, ValueError):
    """A cluster description is impossible, or does not fit the job."""


class EngineError(RelibraError, RuntimeError):
    """A rollout engine, a model or a process did something we cannot go on from."""
