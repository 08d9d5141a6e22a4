"""API server: HTTP as OpenAI's and vLLM's clients speak it, over the attention workers.

In: bodies of requests. Out: answers and streams. Open `app.py` first (endpoints), then `bodies.py` (what they take and
answer), `choice.py` (an answer and its state), `admission.py` (what runs next) and `workers.py` (who answers it).
"""
