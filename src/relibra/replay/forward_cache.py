"""The KV cache among arguments and results of a forward pass of `transformers`, which was renamed in 5.24."""

from __future__ import annotations

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""The name under which a forward pass takes a cache and its result holds it: `past_key_values` before 5.24."""
