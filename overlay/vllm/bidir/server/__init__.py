# SPDX-License-Identifier: Apache-2.0
"""What the API server's process does for read-back."""
