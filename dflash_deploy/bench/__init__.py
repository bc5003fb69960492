"""Load, timing and output checks against any running server."""
