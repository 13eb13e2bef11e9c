"""The framework-free client: numpy arrays in, numpy arrays out, and the same without servers."""
