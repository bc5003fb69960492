"""The virtual environment that SGLang runs in, and the patches applied to it."""
