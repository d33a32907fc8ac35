# SPDX-License-Identifier: Apache-2.0
"""Metrics, log lines and traces: what operators and their tools are told.

`metrics` counts and times; `last_errors` and `last_minutes` are for people. With
`--otlp-traces-endpoint` (`trace_options`) a turn tells its `spans`, which `turn_spans` makes and
`tracing` sends. `log_lines` writes while nothing waits.
"""
