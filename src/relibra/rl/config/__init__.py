"""Configuration of a run. In: a TOML file and overrides. Out: `RunConfig`, one frozen section per stage.

`settings.py` explains every setting (start there), `defaults.py` fills what was not given, and `run_config.py` has the
rules between sections, and loads. Imports no torch.
"""
