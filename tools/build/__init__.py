"""Turn a pinned vLLM release wheel into ours: patched, overlaid, relabelled and proven.

One module per step, in the order in which they run:
pins -> fetch -> verify -> apply -> overlay -> relabel -> write -> prove.
`pipeline` strings them together; `python -m tools.build --help` is the command line.
"""
