"""Changes to an installed SGLang: which are needed, made so that they can be undone byte for byte."""
