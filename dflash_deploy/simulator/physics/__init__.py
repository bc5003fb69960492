"""What a card, a model and a command line come to: memory and time. Pure functions, no clock, no network."""
