"""The only door to private torch, one file for each part of torch.

Every private name that the library uses is imported here and nowhere else, so a new torch release breaks in one place,
by name: `tests/test_probe.py` checks each one. Supported: torch 2.11 to 2.15.
"""
