# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 towards clients, and nothing of what it is for.

A server of our own over httptools, the parser that vLLM's API server has as well: a general one
costs a turn more than all that the router does with it. What is refused here has the shape of the
API, and none of what a client has sent is logged.
"""
