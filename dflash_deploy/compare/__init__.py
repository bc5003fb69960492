"""Methods side by side: each launched in turn on one card, measured, examined, told apart by statistics."""
