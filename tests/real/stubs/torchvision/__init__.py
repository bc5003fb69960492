"""Torchvision, which only image models would use."""

from absent import anything, fill

__version__ = "0.0.0"

fill(__name__, anything)
