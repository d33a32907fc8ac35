# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 towards clients: a `listener` has connections, a `connection` a `reader` that makes
`request`s, `routes` say what serves them, and a `response` or a `stream` is the answer. `fields`
are those of any head, of nodes' too.

A server of our own over httptools, the parser that vLLM's API server has as well: a general one
costs a turn more than all that the router does with it. What is refused here has the shape of the
API, and none of what a client has sent is logged.
"""
