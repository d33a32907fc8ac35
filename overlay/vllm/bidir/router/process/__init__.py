# SPDX-License-Identifier: Apache-2.0
"""What the process runs on: the loop and its limits, and tasks that begin, repeat and end."""
