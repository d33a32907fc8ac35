# SPDX-License-Identifier: Apache-2.0
"""What several routers share: nothing by default, or all conversations in one Redis.

`state` is what a turn asks of either. `shared` and `lines` bring in and tell what others know, in
the form that `wire` writes and checks, over a `redis_link` that never keeps a turn waiting.
"""
