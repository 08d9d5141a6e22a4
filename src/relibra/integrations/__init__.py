"""Integrations: what other systems load from relibra, one folder per system. Start with `vllm/plugin.py`."""
