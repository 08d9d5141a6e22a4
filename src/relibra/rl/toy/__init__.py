"""The built-in demo: tiny model, its tasks, character tokenizer, supervised warm-up. No run on your own model needs it.

In: `TaskSettings`, `ModelSettings`, `WarmupSettings`. Out: a task, a model configuration, a policy that answers some
prompts. Start with `tasks.py`.
"""
