# SPDX-License-Identifier: Apache-2.0
"""Verified read-back: the connector that `bidirectional_kv_xfer` selects."""
