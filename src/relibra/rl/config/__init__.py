"""Configuration of a run. In: a TOML file and overrides. Out: `RunConfig`, one frozen section per stage.

`settings.py` explains every setting (start there). `run_config.py` reads them and fills in what was not given, in the
order in which it is written; `rules.py` holds what does not fit together, `removed.py` the names of earlier versions.
Imports no torch.
"""
