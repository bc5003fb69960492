"""Whether answers are right: speed is worth nothing when the text is garbage.

``faults`` looks at answers that a load left behind. ``exam`` asks questions whose right answers are
known, and ``agreement`` compares two servers' answers token by token.
"""
