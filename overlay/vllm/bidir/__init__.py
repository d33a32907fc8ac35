# SPDX-License-Identifier: Apache-2.0
"""What this distribution adds to vLLM: KV read-back between the turns of a conversation.

Nothing here is imported unless it is asked for: with `bidirectional_kv_xfer` off, the server
behaves as the release that it is made from.
"""
