"""Which node a turn should go to: the router's policies over the same 2P2D, under the same load.

python -m tools.bench.policies run
"""
