# SPDX-License-Identifier: Apache-2.0
"""What is remembered between two turns, in little memory, and the leases that keep it alive on D.

Which conversation a request belongs to says `identity`; `conversations` has the last turn of each,
as a `record`, and `kept_params` the params of those that were used last. `leases` are renewed and
given back by `heartbeat`.
"""
