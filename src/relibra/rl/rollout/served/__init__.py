"""Served engines: sampling from servers of SGLang and vLLM, their weights, and what is checked about both.

In: unfinished responses, and the policy. Out: windows. Start with `engine.py`.
"""
