# SPDX-License-Identifier: Apache-2.0
"""The router between clients, prefill nodes (P) and decode nodes (D).

One turn, and the module that each step lives in:

1. parse the request and find what cannot go through P and D    `request`, `client_params`
2. find the conversation it belongs to                          `identity`, `responses`
3. choose a D, sticky to where the KV is, and a P               `pool`, `policies`
4. prefill leg: P reads back what D kept, computes the rest     `legs`
5. decode leg: bytes pass through, D's params are taken out     `legs`, `beginning`, `stream`
6. keep D's params for the next turn                            `admission`, `conversations`,
   in little memory, and ask D for what had to go               `record`, `kept_params`, `recall`
7. renew D's lease, give it back when nobody needs it           `leases`, `heartbeat`

What several routers share is a `state`: `shared` and `shared_lines` bring it in and tell it, in the
form that `shared_wire` writes and checks, over a `redis_link` that never keeps a turn waiting.

Which nodes there are `discovery` knows, by flags, a file or DNS; how they are, `checks` and
`health`; a turn has a `seat` on one, and waits in a `queue` where all are full.

`turns` strings them together (`prefill_leg`, `decode_leg`, `keeping`), `app` is the HTTP server around it, `cli` the command,
`runtime` what the process runs on.
`metrics` counts and times, `progress` each turn; `last_errors` and `last_minutes` are for people.
`status` is what they show, as JSON or on a page (`status_page`, `status_style`).
With `--otlp-traces-endpoint` (`trace_options`) it tells its `spans`, which `turn_spans` makes and
`tracing` sends.
`access` says who may ask, `headers` what crosses, `side_calls` serves what is no turn, `reuse`
tells the client.
It carries metadata only; KV moves between the nodes. It imports nothing of the engine.
"""
