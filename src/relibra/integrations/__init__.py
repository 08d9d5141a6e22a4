"""Relibra inside other systems, one file or folder per system. Start with `vllm/plugin.py`, `trl/planned_grpo.py`."""
