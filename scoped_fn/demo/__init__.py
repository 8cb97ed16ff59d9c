"""The main job of the command line: a byte-level GPT trained through `scoped_fn.compile`."""
