"""Roles: what an attention worker and an expert worker load of a checkpoint, and what each runs.

`checkpoint.py` reads parts of a checkpoint, `remote_experts.py` stands in for experts inside the model,
`expert_worker.py` and `attention_worker.py` are the loops of the two processes.
"""
