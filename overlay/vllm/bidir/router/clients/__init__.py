# SPDX-License-Identifier: Apache-2.0
"""The side of clients: who may ask, what crosses, and how a refusal, a stream and the end look.

`access` says who may ask, by the `keys` that `key_rotation` reads anew; `security` has the options,
`certificate` the server's own. `body` and `headers` say what is taken of a request, `errors` how a
refusal looks in each API, `stream` sends what is streamed, `draining` ends it all, `http_log` keeps
what clients send out of the log.
"""
