"""Front: HTTP as OpenAI's and vLLM's clients speak it, over the attention workers.

In: bodies of requests. Out: answers and streams. Open `app.py` first (paths), then `generation.py` (one request),
`admission.py` (who is next) and `workers/` (samples at the workers). `endpoints/` holds the forms of bodies and
answers.
"""
