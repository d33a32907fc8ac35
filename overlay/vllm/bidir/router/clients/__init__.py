# SPDX-License-Identifier: Apache-2.0
"""The side of clients: who may ask and what, and how a refusal, a stream and the end look.

`access` says who may ask, by the `keys` that `key_rotation` reads anew; `security` has the options,
`certificate` the server's own. Of a request `body` and `headers` are taken, and a `request` made,
in which a client must not set what `client_params` refuses; `parts` reads JSON that may be of any
size. `errors` says how a refusal looks in each API, `reuse` what was reused, `draining` ends it.
"""
