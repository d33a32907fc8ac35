# SPDX-License-Identifier: Apache-2.0
"""The router between clients, prefill nodes (P) and decode nodes (D).

One turn, and where each step is decided:

1. who asks, and what is taken of the request                    `clients`
2. what it asks, and what cannot go through P and D              `clients.request`, `.client_params`
3. which conversation it belongs to                              `conversations.identity`
4. a D, sticky to where the KV is, and a P                       `nodes.pool`, `nodes.policies`
5. prefill leg: P reads back what D kept, computes the rest      `turns.prefill_leg`
6. decode leg: bytes pass through, D's params are taken out      `turns.decode_leg`
7. keep D's params for the next turn                             `turns.keeping`, `conversations`
8. renew D's lease, give it back when nobody needs it            `conversations.heartbeat`

`router` wires these parts, `app` has the routes, `endpoints` and `side_calls` answer what is no
turn, `openapi` describes all, `http` is the server around it, which `server` starts. `options` and
`cli` are the command, `process` what it runs on. Several routers share a `state`; `telemetry` and
`status` tell people and their tools.
It carries metadata only; KV moves between the nodes. It imports nothing of the engine.
"""
