"""A checkpoint written at once: the trainer stages it and writes it while training goes on."""

from relibra.rl.run.checkpoints.checkpoint import stage_checkpoint, write_checkpoint


def save_checkpoint(run, step, *, models, responses, state, keep):
    """Write a checkpoint, and remove all but the latest ones; return its folder; collective."""
    return write_checkpoint(run, stage_checkpoint(step, models=models, responses=responses, state=state), keep)
