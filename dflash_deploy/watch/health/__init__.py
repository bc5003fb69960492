"""Is the service well? In layers, from the unit down to the card, each with a verdict of its own."""
