# SPDX-License-Identifier: Apache-2.0
"""The side of prefill and decode nodes: which there are, how they are, and how they are asked.

Which there are `discovery` knows, by flags, a file or DNS (`names`); how they are, `checks` and
`health`. A `pool` has those of one role, its `policies` choose, a turn has a `seat` on one and
waits in a `queue` where all are full. A `client` asks over a kept `connection` and gives a `reply`,
which waits for a node no longer than that is up (`while_up`); `calls` are answered whole, and
`size_lines` tell what has come as one chunk.
`side_channels` knows where NIXL of each node listens; nobody else may be named.
"""
