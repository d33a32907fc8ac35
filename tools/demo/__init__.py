"""One streamed conversation through P, D and the router, without and with read-back.

Needs no GPU: it starts real engines with a tiny random model. Run `python -m tools.demo`.
"""
