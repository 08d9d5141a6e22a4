"""Relibra inside other systems, one folder per system. Start with `vllm/plugin.py`, `trl/planned_grpo.py`."""
