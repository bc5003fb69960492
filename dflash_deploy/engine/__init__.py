"""How an inference engine is spoken to. The values here say nothing of any one engine."""
