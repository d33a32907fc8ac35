"""A profile of read-back on GPUs: stock and ours in one run, each request by itself.

`python -m tools.bench.gpu run` measures, `… report` makes tables and charts of it. Neither
needs a network. Nothing is sent through a router: the client plays its part.
"""
