"""The same operations in vectorised torch, for every other device."""
