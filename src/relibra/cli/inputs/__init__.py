"""What verbs read from the command line: options, requests made of them, and the traces, machines and models they name.

In: command-line words. Out: a trace cut into micro-batches for a machine, sizes of models. Open `requests.py` first:
each verb takes one frozen request, and `options.py` holds every shared option once.
"""
