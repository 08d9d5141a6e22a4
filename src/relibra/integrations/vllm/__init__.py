"""vLLM: a plug-in that every process of a server loads. Start with `plugin.py`."""
