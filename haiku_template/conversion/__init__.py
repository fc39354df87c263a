"""Conversion of pickles to safetensors, in a child process that runs none of them."""
