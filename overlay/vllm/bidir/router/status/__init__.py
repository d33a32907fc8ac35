# SPDX-License-Identifier: Apache-2.0
"""The state of a router at one moment: as JSON (`status`), and on a `page` in its own `style`."""
