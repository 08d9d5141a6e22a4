"""The name of the KV cache in forward passes of `transformers`, which changed in 5.24."""

from __future__ import annotations

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAME = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""Name of the argument and of the field in the result: `cache` from 5.24 on, `past_key_values` before."""
