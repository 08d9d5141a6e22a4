"""Front: OpenAI-compatible HTTP over the attention workers.

`clients.py` sends requests to workers and hands their progress back, `text.py` turns text into tokens and back,
`completions.py` is the endpoint's values and answers, `app.py` binds them to paths.
"""
