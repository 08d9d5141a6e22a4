"""Configuration of a run. In: a TOML file and overrides. Out: `RunConfig`, one frozen section per stage.

`settings.py` explains every setting (start there), `presets.py` holds the algorithms, `consistency.py` the rules
between sections, and `run_config.py` loads. Imports no torch.
"""
