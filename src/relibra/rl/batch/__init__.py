"""From responses to micro-batches on ranks: schedule, plan of the step, token batches.

In: responses. Out: a `TrainingBatch`. Start with `training_batch.py`.
"""
