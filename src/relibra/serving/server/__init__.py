"""API server: HTTP as OpenAI's and vLLM's clients speak it, over the attention workers.

In: bodies of requests. Out: answers and streams. Open `app.py` first (endpoints), then `reading.py` (bytes to a body),
`bodies.py` (what endpoints take and answer), `choice.py` (an answer and its state), `admission.py` (what runs next) and
`workers.py` (who answers it); on the way back `text.py` and `connections.py`.
"""
