"""Turns files of other formats into model folders, each in a confined child process. No torch."""
