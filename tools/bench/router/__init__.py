"""What a router costs: the same load over the same scripted engines, with and without one.

`engines` are a P and a D that compute nothing, in a process of their own; `client` drives them;
`load` is one measurement; `arms` starts what stands between, `run` takes the arms in turns;
`figures`, `table` and `chart` say what came out and whether it is what is required.
"""
