# SPDX-License-Identifier: Apache-2.0
"""One turn, from the request to what is kept of its answer.

`turns` has the order: complete the request (`responses`), find what D keeps (`recall`),
`prefill_leg`, `decode_leg`, `keeping`. `legs` are the HTTP calls of both; `beginning` tells whether
a stream is an answer, `stream` takes D's params out of it, `pass_through` hands it on. What nodes
say of params passes `admission`; `progress` tells metrics and traces.
"""
