"""What idle conversations cost a busy decode node: kept for nobody, for a fixed time, by lease.

One decode node with little KV memory; conversations that take a turn, rest, and come back; between
their turns streams that run on the node directly, first few enough to fit beside what is kept, then
so many that they need all of its memory.
"""
