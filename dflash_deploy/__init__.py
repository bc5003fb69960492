"""Deploy and autotune SGLang with DFlash speculative decoding on consumer GPUs."""

__version__ = "0.1.0"
