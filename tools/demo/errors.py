"""What ends the demo with one message."""


class DemoError(Exception):
    """A request failed, or a figure could not be measured."""
